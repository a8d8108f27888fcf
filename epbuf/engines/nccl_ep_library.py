"""The words of NCCL EP as the engine uses them: a group on a communicator of its own, and a handle for each frame.

Source: nccl-extensions 0.1.0 (nccl.ep) and nccl4py 0.6.0 (nccl.core).
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Sequence
from typing import Any

import torch

from epbuf.engine import Encoded
from epbuf.errors import ConfigError, NativeError
from epbuf.plan import NCCL_EP_EXPERTS_MULTIPLE, Plan
from epbuf.windows.group import Group

EXTRA = "nccl-ep"
MODULES = ("nccl.core", "nccl.ep")

_MIN_TIMEOUT_S = 300.0  # a peer that compiles a kernel is not a peer that died, and the library's time-out is fatal


def missing() -> str:
    """Say what the extra has that is not installed, or cannot be imported; nothing if all is there."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken installation raises what it likes
            return (
                f'engine="nccl_ep" needs {name}, which cannot be imported ({type(error).__name__}: {error}); install '
                f"the extra: pip install 'epbuf[{EXTRA}]'"
            )
    return ""


class Library:
    """The library's group on a communicator of its own, and its words as we use them."""

    def __init__(self, plan: Plan, group: Group, device: torch.device) -> None:
        core, ep = (importlib.import_module(name) for name in MODULES)
        self.ep, self._device, config = ep, device, plan.config
        made = bytes(core.get_unique_id().as_bytes) if group.rank == 0 else b""
        identity = core.UniqueId.from_bytes(group.all_gather(made)[0])
        self._comm = core.Communicator.init(nranks=group.size, rank=group.rank, unique_id=identity)
        _check_domains(config.num_experts, _num_domains(self._comm))
        self._group = ep.Group.create(
            self._comm,
            ep.GroupConfig(
                algorithm=ep.Algorithm.HIGH_THROUGHPUT, num_experts=config.num_experts, num_topk=config.num_topk,
                max_dispatch_tokens_per_rank=config.max_tokens_per_rank,
                max_recv_tokens_per_rank=plan.capacity_rows, max_token_bytes=plan.nccl_ep_token_bytes,
                max_num_sms=config.max_num_sms or _max_num_sms(group, device), zero_copy=ep.ZeroCopyMode.OFF,
                overflow_policy=ep.OverflowPolicy.TRAP,  # never: RouteCounts.summarise; DROP first clears all C rows
                timeout_ns=int(max(config.timeout_s, _MIN_TIMEOUT_S) * 1e9),
            ),
        )  # fmt: skip
        self._handle_config = ep.HandleConfig(dispatch_output_per_expert_alignment=config.expert_alignment)
        self._num_topk = config.num_topk

    @property
    def stream(self) -> Any:
        """The current stream."""
        return torch.cuda.current_stream(self._device)

    def all_gather(self, rows: torch.Tensor, rank: int) -> None:
        """Exchange each rank's row of [R, n] with all."""
        self._comm.allgather(rows[rank], rows, stream=self.stream)

    def new_handle(self, memory: torch.Tensor) -> Handle:
        """Make a handle in memory of ours.

        Raises:
            NativeError: it needs more.
        """
        bindings = importlib.import_module("nccl._extensions.bindings.nccl_ep")
        layout, config = int(self.ep.Layout.EXPERT_MAJOR), self._handle_config._lowpp.ptr
        needed = int(bindings.handle_mem_size(self._group.ptr, layout, config, self._num_topk))
        if needed > memory.nbytes:
            raise NativeError(
                f"a handle of this NCCL EP needs {needed:,} bytes and region nccl_ep_handle of the plan has "
                f"{memory.nbytes:,}, which is for nccl-extensions 0.1.0; install that version"
            )
        described = self.ep.Tensor(memory)
        pointer = bindings.init_handle(self._group.ptr, layout, config, self._num_topk, described.ptr)
        return Handle(self, self.ep.Handle(pointer))

    def destroy(self) -> None:
        self._group.destroy()
        self._comm.destroy()


class Handle:
    """One frame's routing in the library. Descriptors are made for each call; the library copies them.

    Attributes:
        num_rows: tokens that the latest `update` was given, which every call until the next one must have.
    """

    def __init__(self, library: Library, handle: Any) -> None:
        self._library, self._handle, ep = library, handle, library.ep
        self.num_rows = 0
        self._backward_dispatch = ep.DispatchConfig(pass_direction=ep.PassDir.BWD)
        self._backward_combine = ep.CombineConfig(pass_direction=ep.PassDir.BWD)
        self._with_scales = ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.FWD)

    def update(self, ids: torch.Tensor) -> None:
        """Route by new ids.

        Shapes: ids [T, K] int64.
        """
        self.num_rows = ids.shape[0]
        self._handle.update(self._library.ep.Tensor(ids), stream=self._library.stream)

    def dispatch(
        self, rows: Encoded, weights: torch.Tensor | None, into: Encoded, recv_weights: torch.Tensor | None
    ) -> None:  # fmt: skip
        """Move rows; with weights forward, without them gradients."""
        ep, described = self._library.ep, self._described
        config = self._backward_dispatch if weights is None else None
        if rows.scales is not None:
            config = self._with_scales
        self._handle.dispatch(
            ep.DispatchInputs(
                tokens=described(_as_wire(rows)), topk_weights=described(weights), scales=described(rows.scales)
            ),
            ep.DispatchOutputs(
                tokens=described(_as_wire(into)), topk_weights=described(recv_weights), scales=described(into.scales)
            ),
            config=config, stream=self._library.stream,
        )  # fmt: skip

    def combine(
        self, rows: torch.Tensor, out: torch.Tensor, weights: torch.Tensor | None, out_weights: torch.Tensor | None
    ) -> None:  # fmt: skip
        """Bring rows back; with weights those are gradients, of rows and of weights."""
        ep, described = self._library.ep, self._described
        self._handle.combine(
            ep.CombineInputs(tokens=described(rows), topk_weights=described(weights)),
            ep.CombineOutputs(tokens=described(out), topk_weights=described(out_weights)),
            config=self._backward_combine if weights is not None else None, stream=self._library.stream,
        )  # fmt: skip

    def destroy(self) -> None:
        self._handle.destroy()

    def _described(self, tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else self._library.ep.Tensor(tensor)


def _as_wire(rows: Encoded) -> torch.Tensor:
    """Return data in a dtype that the library carries: raw bytes pass for some float of their size, and stay bytes."""
    if rows.data.dtype != torch.uint8:
        return rows.data
    return rows.data.view(torch.bfloat16 if rows.scales is None else torch.float8_e4m3fn)


def _max_num_sms(group: Group, device: torch.device) -> int:
    """Return how many multiprocessors the library may fill if the user names none: its own number, unless ranks share.

    Its kernels wait for each other's on the device, so those of all ranks of a GPU must run at the same time.
    """
    found = torch.cuda.get_device_properties(device)
    return share_of_sms(
        group.all_gather(f"{socket.gethostname()} {found.uuid}"), group.rank, found.multi_processor_count
    )


def share_of_sms(gpus: Sequence[str], rank: int, num_sms: int) -> int:
    """Return a rank's even share of its GPU's multiprocessors; 0 if no other rank is on that GPU.

    Raises:
        ConfigError: it would be less than two.
    """
    num_sharing = gpus.count(gpus[rank])
    share = num_sms // num_sharing // 2 * 2
    if not share:
        raise ConfigError(
            f'engine="nccl_ep" found {num_sharing} ranks on one GPU of {num_sms} multiprocessors, where each needs two '
            "at the same time as all others; use fewer ranks a GPU, or EpConfig(max_num_sms=)"
        )
    return share if num_sharing > 1 else 0


def _num_domains(communicator: Any) -> int:
    """Return how many NVLink domains the ranks are in; 1 where NCCL does not say, as for ranks that share a GPU."""
    try:
        return int(communicator.n_lsa_teams)
    except Exception:  # its type is the library's
        return 1


def _check_domains(num_experts: int, num_domains: int) -> None:
    per_domain = num_experts // max(num_domains, 1)
    if per_domain % NCCL_EP_EXPERTS_MULTIPLE:
        raise ConfigError(
            f'engine="nccl_ep" found {num_domains} NVLink domains with {per_domain} of num_experts={num_experts} each '
            f"and takes a multiple of {NCCL_EP_EXPERTS_MULTIPLE}; pad the experts, or use larger domains"
        )
