"""The kill matrix that `python -m ci.mutants --kills FILE` wrote, as the pages show it: by family, and by claim."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

SCHEMA = Path(__file__).with_name("matrix.schema.json")

Kills = Mapping[str, Any]


def load(path: Path) -> Kills:
    """The file as the schema of the pages' JSON describes it; raises ValueError, in one line, for anything else."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    try:
        found: Kills = json.loads(path.read_text(encoding="utf-8"))
        jsonschema.validate(found, {**schema["$defs"]["kills"], "$defs": schema["$defs"]})
    except jsonschema.ValidationError as error:
        why = f"{error.json_path}: {error.message.splitlines()[0][:200]}"
        raise ValueError(f"{path}: {why}; write it again by python -m ci.mutants --kills FILE") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: it is no JSON; write it again by python -m ci.mutants --kills FILE") from error
    return found


def survivors(kills: Kills) -> list[dict[str, Any]]:
    return [mutant for mutant in kills["mutants"] if not mutant["caught_by"]]


def by_family(kills: Kills) -> dict[str, list[dict[str, Any]]]:
    """The mutants that were caught, under the family of the first claim that each breaks."""
    families: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for mutant in kills["mutants"]:
        if mutant["caught_by"]:
            families[mutant["breaks"][0].partition(".")[0]].append(mutant)
    return dict(sorted(families.items()))


def of_claim(kills: Kills, claim: str) -> list[tuple[dict[str, Any], list[str]]]:
    """The mutants that cases of the claim caught, each with those cases; narrow mutants first, for broad ones prove little."""
    caught = [
        (mutant, [case for case in mutant["caught_by"] if case.partition("/")[0] == claim])
        for mutant in kills["mutants"]
    ]
    return sorted(((mutant, cases) for mutant, cases in caught if cases), key=lambda pair: bool(pair[0]["broad"]))
