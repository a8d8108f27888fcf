"""Put epbuf under Megatron-Core, once, undoably, where the version is one that it knows.

What is installed is remembered where it was installed, in Megatron-Core's own module: `destroy_model_parallel` there
knows its installation.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch

from epbuf.arena import Arena
from epbuf.errors import ConfigError
from epbuf.integrations.megatron.buffers import Buffers, recipe_of
from epbuf.integrations.megatron.dispatcher import bound_to, manager_of
from epbuf.integrations.megatron.planning import MegatronPlan
from epbuf.plan import Plan

Route = Literal["rebind", "spec"]

VERSIONS = ("0.19.2", "0.20")
"""Versions of Megatron-Core that the adapter knows, and what follows them: 0.19.2 is tested, 0.20 was read."""

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_STATE = "megatron.core.parallel_state"
_COMMUNICATION = "megatron.core.transformer.moe.fused_a2a"
_MANAGER_PARAMETERS = ("group", "num_local_experts", "router_topk", "num_experts", "config")


@dataclass(frozen=True)
class _Rebound:
    """One name of a module of Megatron-Core, and what it was and is bound to."""

    module: Any
    name: str
    before: Any
    now: Any


class Installation:
    """epbuf under Megatron-Core, until `undo`. As a context manager it undoes, and closes the arena.

    Attributes:
        route: "rebind" or "spec".
        buffers: owner of the arena.
    """

    def __init__(self, route: Route, buffers: Buffers) -> None:
        self.route = route
        self.buffers = buffers
        self._rebound: list[_Rebound] = []
        self._replaced: list[tuple[Any, Any]] = []

    @property
    def arena(self) -> Arena | None:
        """The arena of all layers, None before the first eager dispatch."""
        return self.buffers.arena

    def swap(self, spec: Any) -> Any:
        """Return a layer spec with epbuf's `MoELayer` in place of Megatron-Core's; the given one stays as it is."""
        layer = importlib.import_module("epbuf.integrations.megatron.layer")
        return layer.swap_layers(spec, layer.layer_class(self.buffers))

    def replace_dispatchers(self, model: Any) -> int:
        """Give every MoE layer of a built model epbuf's dispatcher; return how many. Before optimiser and graphs.

        Raises:
            ConfigError: the model has no MoE layer.
        """
        layer = importlib.import_module("epbuf.integrations.megatron.layer")
        layers = [each for each in layer.moe_layers(model) if manager_of(each) is None]
        if not layer.moe_layers(model):
            raise ConfigError(f"replace_dispatchers found no MoELayer in {_name(model)}; pass the model, or its chunks")
        for each in layers:
            self._replaced.append((each, layer.replace_dispatcher(each, self.buffers)))
        _name_layers(layer.moe_layers(model))
        return len(layers)

    def close(self) -> None:
        """Give the window back; collective. `destroy_model_parallel` does it first, as long as this is installed."""
        self.buffers.close()

    def undo(self) -> None:
        """Bind every name of Megatron-Core, and every replaced dispatcher, to what it was. Idempotent; local.

        Models that were built with a rebound name keep epbuf's managers, and their arena stays open until `close`.

        Raises:
            ConfigError: somebody else has rebound one of the names since; nothing has changed.
        """
        for each in self._rebound:
            if getattr(each.module, each.name) is not each.now:
                raise ConfigError(
                    f"undo() would lose what somebody else has bound to {each.module.__name__}.{each.name} since: "
                    "undo that first"
                )
        for each in self._rebound:
            setattr(each.module, each.name, each.before)
        for moe_layer, old in self._replaced:
            moe_layer.token_dispatcher = old
        self._rebound, self._replaced = [], []

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()
        self.buffers.leave(kind, error, trace)

    def rebind(self, module: Any, name: str, now: Any) -> None:
        """Bind a name of Megatron-Core to something of ours."""
        self._rebound.append(_Rebound(module, name, getattr(module, name), now))
        setattr(module, name, now)


def install(
    plan: MegatronPlan | Plan | Mapping[str, Any], route: Route = "rebind", *,
    device: torch.device | str | None = None, window: str = "auto",
) -> Installation:  # fmt: skip
    """Put epbuf under Megatron-Core; call it before the model is built. Local: nothing is allocated.

    The arena is opened by the first eager dispatch, or by `prepare(model)`. Installing the same again gives the same
    installation.

    Args:
        plan: a plan, or the arguments of `plan_from_config` as a dict; then it is planned from the layers' own config.
        route: "rebind": models whose config says flex and ncclep have epbuf's managers. "spec": those have whose layer
            spec went through `installation.swap`, or which went through `replace_dispatchers`.
        device: where tokens lie; None: the current CUDA device if there is one.
        window: as for `Arena.open`.

    Raises:
        ConfigError: a Megatron-Core that the adapter does not know; another installation stands.
    """
    if route not in ("rebind", "spec"):
        raise ConfigError(f'install(route={route!r}): the routes are "rebind" and "spec"')
    recipe = recipe_of(plan)
    check_version()
    standing = installed()
    if standing is not None:
        if (standing.route, standing.buffers.recipe) == (route, recipe):
            return standing
        raise ConfigError(
            f"install with route {route!r} and {_name_of_recipe(recipe)}: epbuf is installed already, with route "
            f"{standing.route!r} and {_name_of_recipe(standing.buffers.recipe)}; undo() that first"
        )
    made = Installation(route, Buffers(recipe, device, window))
    state, communication = importlib.import_module(_STATE), importlib.import_module(_COMMUNICATION)
    made.rebind(state, "destroy_model_parallel", _closing_first(made, state.destroy_model_parallel))
    made.rebind(communication, "nccl_ep_finalize", _closing_first(made, communication.nccl_ep_finalize))
    if route == "rebind":
        made.rebind(importlib.import_module(_DISPATCHER), "_NCCLEPManager", bound_to(made.buffers))
    return made


def installed() -> Installation | None:
    """Return the installation that stands, if one does."""
    destroy = importlib.import_module(_STATE).destroy_model_parallel
    found: Installation | None = getattr(destroy, "installation", None)
    return found


def prepare(model: Any) -> Arena | None:
    """Open the arena of a built model by hand: what a capture needs that no eager step comes before.

    Collective over the group of its MoE layers; None, and nothing to do, for a pipeline stage without any. Also gives
    ranges in profiles the numbers of layers.

    Args:
        model: a module, or a list of chunks.

    Raises:
        CaptureError: called in a capture.
        ConfigError: an MoE layer, and none with epbuf's manager.
    """
    layer = importlib.import_module("epbuf.integrations.megatron.layer")
    layers = layer.moe_layers(model)
    if not layers:
        return None
    managers = [manager for manager in map(manager_of, layers) if manager is not None]
    if not managers:
        raise ConfigError(
            f"prepare found {len(layers)} MoE layer(s) and none with epbuf's manager in {_name(model)}: call install "
            "before the model is built, or replace_dispatchers after"
        )
    _name_layers(layers)
    arenas = [manager.buffers.ready(manager.needs) for manager in managers]  # each layer must fit
    return arenas[0]


def replace_dispatchers(model: Any) -> int:
    """Do `installation.replace_dispatchers(model)` for the installation that stands.

    Raises:
        ConfigError: none does, or the model has no MoE layer.
    """
    standing = installed()
    if standing is None:
        raise ConfigError("replace_dispatchers before install: install says how much memory there is to be")
    return standing.replace_dispatchers(model)


def check_version() -> None:
    """Refuse a Megatron-Core that the adapter does not know.

    Raises:
        ConfigError: none is installed, another version, or one without what the adapter needs; it is named.
    """
    try:
        found = importlib.import_module("megatron.core.package_info").__version__
    except ImportError as error:
        raise ConfigError(
            f"Megatron-Core cannot be imported ({error}); install it: pip install megatron-core=={VERSIONS[0]}"
        ) from error
    if not any(found == version or found.startswith((f"{version}.", f"{version}+")) for version in VERSIONS):
        raise ConfigError(
            f"epbuf knows Megatron-Core {' and '.join(VERSIONS)} and found {found}: install one of those, or an epbuf "
            "that knows it"
        )
    missing = _missing_names()
    if missing:
        raise ConfigError(f"this Megatron-Core ({found}) lacks {', '.join(missing)}; install {VERSIONS[0]}")


def _missing_names() -> list[str]:
    wanted = {_DISPATCHER: ("_NCCLEPManager", "MoEFlexTokenDispatcher"), _STATE: ("destroy_model_parallel",),
              _COMMUNICATION: ("nccl_ep_finalize",)}  # fmt: skip
    modules = {name: importlib.import_module(name) for name in wanted}
    missing = [f"{module}.{name}" for module, names in wanted.items() for name in names
               if not hasattr(modules[module], name)]  # fmt: skip
    if not missing:
        parameters = tuple(inspect.signature(modules[_DISPATCHER]._NCCLEPManager).parameters)
        missing = [f"{_DISPATCHER}._NCCLEPManager({name}=)" for name in _MANAGER_PARAMETERS if name not in parameters]
    return missing


def _closing_first(installation: Installation, original: Callable[..., Any]) -> Callable[..., Any]:
    """Close the arena while its group still exists, then do what was to be done."""

    @functools.wraps(original)
    def destroy(*arguments: Any, **options: Any) -> Any:
        installation.close()
        return original(*arguments, **options)

    vars(destroy)["installation"] = installation
    return destroy


def _name_layers(layers: list[Any]) -> None:
    for each in layers:
        manager = manager_of(each)
        if manager is not None and each.layer_number is not None:
            manager.layer = f"layer {each.layer_number}"


def _name(model: Any) -> str:
    return " and ".join(type(m).__name__ for m in (model if isinstance(model, (list, tuple)) else [model]))


def _name_of_recipe(recipe: Plan | Mapping[str, Any]) -> str:
    return f"plan {recipe.fingerprint[:12]}" if isinstance(recipe, Plan) else f"arguments {dict(recipe)!r}"
