"""DDPs that do with static_graph=True what they should not, each in one way."""

from torch.nn.parallel import DistributedDataParallel


class ForgetsStaticGraph(DistributedDataParallel):
    """Breaks the promises of static_graph=True: it takes the option and ignores it."""

    breaks = (
        "static_graph.unused_allowed",
        "static_graph.sets_may_differ_by_rank",
        "static_graph.newly_used_raises",
        "checkpointing.with_reentry_and_static_graph",
    )

    def __init__(self, module, *args, static_graph=False, **options):
        super().__init__(module, *args, **options)


class SearchesInstead(DistributedDataParallel):
    """Breaks the promise that static_graph=True never walks the graph and allows more than find_unused_parameters does."""

    breaks = (
        "static_graph.newly_used_raises",
        "static_graph.newly_unused_raises",
        "static_graph.parameter_outside_forward",
        "unused_search.walks_every_iteration",
        "checkpointing.with_reentry_and_static_graph",
        "checkpointing.unused_with_static_graph",
    )

    def __init__(self, module, *args, static_graph=False, find_unused_parameters=False, **options):
        super().__init__(module, *args, find_unused_parameters=static_graph or find_unused_parameters, **options)


class FirstIterationIsLocal(DistributedDataParallel):
    """Breaks the promise that the first iteration of a static graph is reduced like the others."""

    breaks = ("static_graph.same_numbers",)
    forwards = 0

    def forward(self, *inputs, **keywords):
        self.forwards += 1
        local = self.static_graph and self.forwards == 1
        return (self.module if local else super().forward)(*inputs, **keywords)


class AlwaysStatic(DistributedDataParallel):
    """Breaks the promises about changing graphs: every graph is taken to be static."""

    breaks = (
        "missing_gradient.next_forward_raises",
        "unused_parameters.any_set_on_any_rank",
        "checkpointing.reentrant_limits",
    )

    def __init__(self, module, *args, static_graph=True, **options):
        super().__init__(module, *args, static_graph=True, **options)


class DoublesStaticGraphs(DistributedDataParallel):
    """Breaks the promise that static_graph=True changes no value: every gradient is doubled before it is reduced."""

    breaks = (
        "static_graph.same_numbers",
        "static_graph.unused_allowed",
        "static_graph.parameter_outside_forward",
        "checkpointing.with_reentry_and_static_graph",
        "checkpointing.unused_with_static_graph",
    )

    def __init__(self, module, *args, static_graph=False, **options):
        super().__init__(module, *args, static_graph=static_graph, **options)
        if static_graph:
            for parameter in module.parameters():
                parameter.register_hook(lambda gradient: 2 * gradient)


class DoublesCheckpointed(DistributedDataParallel):
    """Breaks the mean for models that checkpoint (here: have a `use_reentrant`): the last parameter's gradient is doubled."""

    breaks = (
        "checkpointing.without_reentry",
        "checkpointing.with_reentry",
        "checkpointing.with_reentry_and_static_graph",
    )

    def __init__(self, module, *args, **options):
        super().__init__(module, *args, **options)
        if hasattr(module, "use_reentrant"):
            list(module.parameters())[-1].register_hook(lambda gradient: 2 * gradient)
