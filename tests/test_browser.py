"""The pages in a real browser, opened from the file system: filters, links, keyboard alone, a narrow screen, and the dark."""

import json
import shutil
from contextlib import contextmanager

import pytest

from ci import table
from tests import pages

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[dev]'")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("no browser to look at the pages with: apt-get install chromium", allow_module_level=True)
pytestmark = pytest.mark.timeout(600)  # the site is built by whichever test asks first
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
BUCKETS = "rebuilt_buckets.cap_and_first_limit"
PAGES = (
    "index",
    "changes",
    "coverage",
    "kills",
    "claim/rebuilt_buckets-cap_and_first_limit",
    "claim/mean_gradients-mean",
)
LEAST_CONTRAST = 4.5
"""Of text on its background, as WCAG 2 asks at level AA."""

CONTRASTS = """() => {
  const channels = color => (color.match(/[\\d.]+/g) || []).map(Number);
  const luminance = color => {
    const [r, g, b] = channels(color).slice(0, 3).map(value => value / 255)
      .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (channels(color).length === 3 || channels(color)[3] === 1) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
    if (!own || element.closest("svg, script, option") || !element.checkVisibility()) continue;
    const [light, dark] = [luminance(getComputedStyle(element).color), luminance(behind(element))].sort((a, b) => b - a);
    found.push([(light + 0.05) / (dark + 0.05), `${element.tagName}.${element.className}: ${element.textContent.slice(0, 40)}`]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}"""


@pytest.fixture(scope="module")
def site():
    return pages.site()


@pytest.fixture(scope="module")
def document(site):
    return json.loads((site / "matrix.json").read_text())


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield launched
        launched.close()


@pytest.fixture
def look(browser, site):
    """Opens a page of the site in a window of this kind; at the end nothing may have been said on its console."""
    said = []

    @contextmanager
    def opened(name, **window):
        context = browser.new_context(**window)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{name}: {message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"{name}: {error}"))
        page.on("requestfailed", lambda request: said.append(f"{name}: {request.url} {request.failure}"))
        page.goto((site / f"{name}.html").as_uri())
        yield page
        context.close()

    yield opened
    assert said == []


def claims_shown(page):
    rows = page.locator("tr.claim:visible th .quiet").all_text_contents()
    return {text.partition(" ")[0] for text in rows}


def shows(claim, verdict):
    """Whether a claim of matrix.json has this verdict in some column."""
    columns = zip(*(case["cells"] for case in claim["cases"]), strict=True)
    return any(table.verdict(table.Cell(cell["verdict"], {}) for cell in cells) == verdict for cells in columns)


def changes(claim, at, *kinds):
    found = table.change(table.Cell("", {}, change=case["cells"][at]["change"]) for case in claim["cases"])
    return found in (kinds or table.CHANGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_from_the_file_system_without_a_word_on_the_console(look, name):
    with look(name) as page:
        assert page.locator("h1").is_visible()
        page.wait_for_load_state("networkidle")


def test_the_matrix_has_a_row_for_each_claim_and_a_word_for_each_cell(look, document):
    with look("index") as page:
        assert claims_shown(page) == {claim["claim"] for claim in document["claims"]}
        columns = len(document["columns"])
        assert page.locator("tr.claim td").count() == columns * len(document["claims"])
        marks = page.eval_on_selector_all(
            "tr.claim td", "cells => cells.map(cell => [cell.classList[1], cell.textContent])"
        )
        by_verdict = {}
        for style, mark in marks:
            by_verdict.setdefault(style, set()).add(mark.strip("≠*"))
        words = [word for words in by_verdict.values() for word in words]
        assert all(words) and len(set(words)) == len(words) == len(by_verdict), "colour would tell what no word does"


def test_the_matrix_is_filtered_by_family_level_verdict_and_words(look, document):
    claims = document["claims"]
    with look("index") as page:

        def filtered(wanted):
            assert claims_shown(page) == {claim["claim"] for claim in wanted}
            assert page.locator("#count").text_content() == f"{len(wanted)} of {len(claims)} claims shown"
            families = page.locator("tr.family:visible").evaluate_all("rows => rows.map(row => row.id)")
            shown = {claim["family"] for claim in wanted}
            assert families == [
                family for family in dict.fromkeys(claim["family"] for claim in claims) if family in shown
            ]
            return wanted

        page.select_option("#family", "no_sync")
        assert 3 < len(filtered([claim for claim in claims if claim["family"] == "no_sync"])) < len(claims)
        page.select_option("#level", "HAZARD")
        assert filtered([claim for claim in claims if (claim["family"], claim["level"]) == ("no_sync", "HAZARD")])
        page.select_option("#family", "")
        filtered([claim for claim in claims if claim["level"] == "HAZARD"])
        page.select_option("#level", "")
        for verdict in ("known", "not offered", "no data"):
            page.select_option("#verdict", verdict)
            assert filtered([claim for claim in claims if shows(claim, verdict)])
        page.select_option("#verdict", "known")
        page.select_option("#level", "MUST")
        assert filtered([claim for claim in claims if claim["level"] == "MUST" and shows(claim, "known")])
        page.get_by_role("button", name="show all").click()
        filtered(claims)
        page.fill("#text", "Complex")
        words = [claim for claim in claims if "complex" in f"{claim['sentence']} {claim['claim']}".lower()]
        assert 0 < len(filtered(words)) < 30
        page.fill("#text", "no such words")
        filtered([])


@pytest.mark.parametrize(("old", "new", "buckets_change"), [("2.3.1", "2.4.1", True), ("2.4.1", "2.8.0", False)])
def test_between_two_releases_only_what_changes_and_only_those_columns_are_shown(
    look, document, old, new, buckets_change
):
    releases = [column["torch"] for column in document["columns"]]
    first, last = releases.index(old), releases.index(new)

    def changing(*kinds):
        after = range(first + 1, last + 1)
        return {claim["claim"] for claim in document["claims"] for at in after if changes(claim, at, *kinds)}

    with look("index") as page:
        page.select_option("#from", label=old)
        page.select_option("#to", label=new)
        assert claims_shown(page) == changing() != set()
        assert (BUCKETS in changing()) == buckets_change
        heads = page.locator("th.release:visible").evaluate_all(
            "heads => heads.map(head => head.firstChild.textContent)"
        )
        assert heads == releases[first : last + 1]
        assert page.locator("tr.claim:visible").first.locator("td:visible").count() == len(heads)
        page.select_option("#change", "changed")
        assert claims_shown(page) == changing("changed") != changing()


def test_what_a_release_changes_is_one_click_from_the_matrix(look, document):
    at = [column["torch"] for column in document["columns"]].index("2.4.1")
    count = sum(changes(claim, at) for claim in document["claims"])
    with look("index") as page:
        page.get_by_role("link", name=f"{count} claims differ in 2.4.1 gloo:cpu").click()
        assert page.url.endswith("changes.html#2-4-1-gloo-cpu")
        section = page.locator("section", has_text="torch 2.4.1 gloo:cpu, after 2.3.1")
        assert section.locator("h2").bounding_box()["y"] < 200
        assert section.locator("article").count() >= count


def test_a_claim_page_has_sentence_source_facts_picture_and_case(look, document):
    (claim,) = (claim for claim in document["claims"] if claim["claim"] == BUCKETS)
    with look("index") as page:
        page.select_option("#family", "rebuilt_buckets")
        page.get_by_role("link", name=claim["sentence"]).click()
        assert page.url.endswith("/claim/rebuilt_buckets-cap_and_first_limit.html")
        assert page.locator("h1").text_content() == claim["sentence"]
        assert page.get_by_text(f"source {claim['source']}").is_visible()
        facts = page.locator("tr", has=page.get_by_role("rowheader", name="buckets", exact=True))
        newest = [column["torch"] for column in document["columns"] if not column["absent"]][-1]
        assert [fact.locator("td").first.text_content() for fact in facts.all()[:2]] == [
            "1.13.1 to 2.3.1 gloo:cpu",
            f"2.4.1 to {newest} gloo:cpu",
        ]
        drawn = page.locator("figure").first
        assert "torch 1.13.1 to 2.3.1" in drawn.locator("figcaption").text_content()
        titles = drawn.locator("svg rect title").all_text_contents()
        assert titles == [f"parameter {at}, 524288 bytes" for at in (5, 4, 3, 2, 1, 0)]
        tops = [round(rect.bounding_box()["y"]) for rect in drawn.locator("svg rect").all()]
        assert tops[0] == tops[1] < tops[2] < tops[3] < tops[4] < tops[5], (
            "two in the first all-reduce, then one in each"
        )
        assert f'"{BUCKETS}",' in page.locator("pre").last.text_content()
        page.get_by_role("link", name="matrix").click()
        assert page.locator("tr.claim").first.is_visible()


def focused(page):
    return page.evaluate(
        """() => {
          const at = document.activeElement, style = getComputedStyle(at), box = at.getBoundingClientRect();
          const top = document.elementFromPoint(box.left + Math.min(box.width / 2, 20), box.top + Math.min(box.height / 2, 8));
          return {id: at.id, href: at.getAttribute("href") || "", ring: style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth),
                  seen: at === document.body || at.contains(top)};
        }"""
    )


def tab_to(page, reached, key="Tab", most=80):
    """Press a key until the focus is where it is wanted; all the way it can be seen where it is."""
    for _ in range(most):
        page.keyboard.press(key)
        at = focused(page)
        assert at["ring"] >= 2 and at["seen"], at
        if reached(at):
            return
    raise AssertionError(f"{most} times {key} do not lead there")


def test_the_keyboard_alone_reaches_filters_and_a_claim(look):
    with look("index", viewport={"width": 1280, "height": 800}) as page:
        tab_to(page, lambda at: at["id"] == "family")
        page.keyboard.type("no sync")
        assert {claim.partition(".")[0] for claim in claims_shown(page)} == {"no_sync"}
        tab_to(page, lambda at: at["id"] == "text")
        page.keyboard.type("accumulates")
        assert claims_shown(page) >= {"no_sync.accumulates"}
        tab_to(page, lambda at: at["href"].endswith("no_sync-accumulates.html"))
        page.keyboard.press("Enter")
        page.wait_for_url("**/no_sync-accumulates.html")
        tab_to(page, lambda at: at["href"].endswith("index.html"))


def test_links_stay_in_sight_however_far_the_keyboard_goes_back_and_forth(look):
    with look("index", viewport={"width": 1280, "height": 800}) as page:
        tab_to(page, lambda at: "after_wrapping" in at["href"])
        tab_to(page, lambda at: "autograd" in at["href"])
        tab_to(page, lambda at: "after_wrapping" in at["href"], "Shift+Tab")
        tab_to(page, lambda at: at["id"] == "text", "Shift+Tab")


@pytest.mark.parametrize("name", PAGES)
def test_on_a_narrow_screen_nothing_hangs_over_the_edge(look, name):
    with look(name, viewport={"width": 360, "height": 740}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.evaluate("document.body.scrollWidth") <= 360


def test_on_a_narrow_screen_the_matrix_scrolls_in_its_own_frame_and_keeps_its_heads(look):
    with look("index", viewport={"width": 360, "height": 740}) as page:
        frame = page.get_by_role("region", name="matrix")
        assert frame.evaluate("frame => frame.scrollWidth > 2 * frame.clientWidth && frame.clientWidth <= 360")
        frame.focus()
        for key, place in (("ArrowRight", "scrollLeft"), ("ArrowDown", "scrollTop")):
            page.keyboard.press(key)
            page.wait_for_function(f"document.querySelector('.tall').{place} > 0")
        frame.evaluate("frame => frame.scrollTo({left: 300, top: 3000, behavior: 'instant'})")
        top = frame.bounding_box()
        for head in (page.locator("thead th").first, page.locator("tr.claim th:visible").nth(40)):
            assert head.bounding_box()["x"] == pytest.approx(top["x"], abs=2)
        assert page.locator("thead th").first.bounding_box()["y"] == pytest.approx(top["y"], abs=2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_text_stands_out_from_what_is_behind_it(look, name, scheme):
    with look(name, color_scheme=scheme) as page:
        found = page.evaluate(CONTRASTS)
        assert len(found) > 30
        assert found[0][0] >= LEAST_CONTRAST, found[:3]
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
        page.add_style_tag(content="h1 { color: #777; }")  # too pale on white, and too dark on black
        assert page.evaluate(CONTRASTS)[0][0] < LEAST_CONTRAST
