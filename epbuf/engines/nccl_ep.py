"""NCCL EP behind our five calls: its high-throughput, expert-major kernels move rows between our regions.

The library has a group on a communicator of its own, and a handle for each frame, whose memory is a region of the plan.
Rows are staged in buffers that it allocates itself (`Plan.engine_bytes`), so it reads and writes ordinary device memory
and never changes what combine reads. What its semantics leave open of the contract is done here, by what a graph
records: counts of all ranks, zones and overflow (nccl_ep_counts.py), ranks without tokens.

Differences that remain are in epbuf/engines/README.md.

Source: nccl-extensions 0.1.0 (nccl.ep) and nccl4py 0.6.0 (nccl.core).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from epbuf import _C
from epbuf.control import ControlWords, KeepsWords
from epbuf.engine import Encoded, NativeEngine, Place, Rows, StreamOrder
from epbuf.engines.nccl_ep_counts import DeviceCounts, RouteCounts, new_outcome
from epbuf.engines.nccl_ep_library import Library
from epbuf.engines.regions import RegionTensors
from epbuf.plan import Plan
from epbuf.windows import Window
from epbuf.windows.group import Group


class NcclEpEngine(KeepsWords, NativeEngine):
    """The calls that move rows are the library's; local ones (decoding, weight gradients) are those of `NativeEngine`.

    An eager route waits for the device once: what a rank refuses is then known to all before a row moves. In a capture
    nothing waits, and what a replay finds is raised by the next call or check(), as on our own engine.
    """

    encodes = False
    refuses_later = True

    def __init__(self, plan: Plan, group: Group, window: Window, device: torch.device) -> None:
        """Open the library's group and handles and run every kernel once. Collective; synchronises.

        Raises:
            ConfigError: experts of an NVLink domain that the library cannot move.
            NativeError: a handle needs more memory than the plan has.
        """
        super().__init__(plan, group.rank, window, device)
        if self._streams is not None:
            # The library's buffers are those of one op at a time.
            self._streams = StreamOrder(device, is_one_order=True)
        self._plan, self._config, self._rank, self._device = plan, plan.config, group.rank, device
        self._pending_refusal = 0
        regions = RegionTensors(plan, window)
        self._words = ControlWords(regions.one("control"), regions.one("frame_counters"))
        self._counts = self._new_counts(plan, regions)
        self._take(regions)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._lib = Library(plan, group, device)
            self._handles = [self._lib.new_handle(memory) for memory in regions.all("nccl_ep_handle")]
            self._warm_up(group)

    def _new_counts(self, plan: Plan, regions: RegionTensors) -> RouteCounts:
        if isinstance(self.native, _C.HostEngine):
            return RouteCounts(plan, self._rank, regions, self._words)
        assert self._streams is not None, "only on CPU there are no streams"
        return DeviceCounts(plan, self._rank, regions, self._words, self.native, self._streams)

    def _take(self, regions: RegionTensors) -> None:
        """Take the regions that calls fill and read; an inference_only plan has none for gradients."""
        self._count_rows = regions.all("count_cells")
        self._recv, self._recv_weights = _received(regions), regions.all("recv_topk_weights")
        self._expert_out = regions.all("expert_out")
        self._grads, self._grad_rows = regions.all("grad_expert_out"), regions.all("grad_recv_tokens")
        self._grad_weights = regions.all("grad_recv_topk_weights")
        self._ones = regions.one("nccl_ep_ones").fill_(1)
        self._no_token, self._no_weights = regions.one("nccl_ep_no_token"), regions.one("nccl_ep_no_weights")

    def route(self, place: Place, topk_idx: torch.Tensor, live_tokens: torch.Tensor | None) -> _C.Outcome:
        with self._behind(place, "forward"):
            refusal, is_captured = place.refusal, bool(self.capture_key())
            if not is_captured:  # a graph would tell the peers again at every replay
                refusal, self._pending_refusal = self._pending_refusal or refusal, 0
            rows = self._count_rows[place.frame]
            self._counts.count(place.frame, rows[self._rank], topk_idx, live_tokens, refusal)
            self._lib.all_gather(rows, self._rank)
            outcome = new_outcome() if is_captured else self._counts.judge(rows.cpu())
            if outcome.status != int(_C.Status.OK):
                self._counts.count_refusal(rows)
                return outcome
            num_tokens = 0 if place.refusal else topk_idx.shape[0]
            self._counts.summarise(place.frame, rows, num_tokens)
            self._handles[place.frame].update(self._or_no_ids(self._counts.sent_ids(place.frame, num_tokens)))
            return outcome

    def dispatch(
        self, place: Place, x: torch.Tensor | Encoded, topk_weights: torch.Tensor | None
    ) -> _C.Outcome:  # fmt: skip
        with self._behind(place, "forward"):
            rows = x if isinstance(x, Encoded) else Encoded(x)
            filled, handle = self._filled(place), self._handles[place.frame]
            weights = self._ones[: handle.num_rows]
            if place.refusal or not rows.data.shape[0]:
                rows = self._no_rows(filled, handle.num_rows)
            elif topk_weights is not None:
                weights = topk_weights.contiguous()
            handle.dispatch(
                Encoded(rows.data.contiguous(), self._padded(rows.scales, filled)), weights, filled,
                self._recv_weights[place.frame],
            )  # fmt: skip
            self._words.open_frame(place.frame)
            return self._complete(place)

    def combine(self, place: Place, rows: Rows, weights: torch.Tensor | None, out: torch.Tensor) -> _C.Outcome:
        with self._behind(place, "forward"):
            staging = self._expert_out[place.workspace]
            source = staging if rows.tensor is None else rows.tensor
            if weights is not None and rows.tensor is not None:
                source = self._weighted(staging[: rows.tensor.shape[0]], rows.tensor, weights, place.frame)
            self._pull(place, source.contiguous(), None if place.refusal else out)
            return self._complete(place)

    def combine_backward(self, place: Place, grad: torch.Tensor, expects_open: bool) -> _C.Outcome:
        with self._behind(place, "backward"):
            if expects_open:
                self._words.expect_open(place.frame)
            region, handle = Encoded(self._grads[place.workspace]), self._handles[place.frame]
            is_none = place.refusal or not grad.shape[0]
            rows = self._no_rows(region, handle.num_rows) if is_none else Encoded(grad.contiguous())
            handle.dispatch(rows, None, region, None)
            return self._complete(place)

    def dispatch_backward(
        self, place: Place, grads: tuple[Rows, Rows], out: torch.Tensor | None, out_weights: torch.Tensor | None,
        *, num_tokens: int, begins_use: bool, clears_open: bool,
    ) -> _C.Outcome:  # fmt: skip
        with self._behind(place, "backward"):
            regions = self._grad_rows[place.workspace], self._grad_weights[place.workspace]
            rows, weights = (_source(given, region) for given, region in zip(grads, regions, strict=True))
            self._pull(place, rows, out, weights, out_weights)
            if out_weights is not None:
                out_weights.masked_fill_(self._counts.sent_ids(place.frame, num_tokens) < 0, 0)
            if clears_open:
                self._words.close_frame(place.frame)
            return self._complete(place)

    def close(self, *, is_healthy: bool = True) -> None:
        """Destroy handles, group and communicator; of an unhealthy group keep them, as to destroy needs the peers."""
        super().close()
        if is_healthy:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            for handle in self._handles:
                handle.destroy()
            self._lib.destroy()

    def _complete(self, place: Place) -> _C.Outcome:
        """End a call whose round is complete, whatever this rank refused: its next route tells the others."""
        self._pending_refusal = self._pending_refusal or place.refusal
        return new_outcome()

    @contextmanager
    def _behind(self, place: Place, direction: str) -> Iterator[None]:
        """Order a call behind those that shared its frame or workspace, outside autograd."""
        if self._streams is not None:
            self._streams.enter(place, direction)
        with torch.no_grad():
            yield

    def _or_no_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids [T, K]; for no tokens those of one that has no expert."""
        return ids if ids.shape[0] else self._no_weights[1:].to(torch.int64).fill_(-1)

    def _filled(self, place: Place) -> Encoded:
        return self._recv[place.frame if self._plan.lifetimes["recv_tokens"] == "frame" else max(place.workspace, 0)]

    def _no_rows(self, like: Encoded, num_rows: int) -> Encoded:
        """Return rows of zeros in the format of some regions, for a rank that has no tokens, or refuses."""
        nbytes = like.data.shape[1] * like.data.element_size()
        scale_bytes = 0 if like.scales is None else like.scales.shape[1]
        data, scales = self._no_token[:1, :nbytes], self._no_token[1:, :scale_bytes]
        if num_rows > 1:
            data, scales = (
                torch.zeros(num_rows, n, dtype=torch.uint8, device=self._device) for n in (nbytes, scale_bytes)
            )
        return Encoded(data.view(like.data.dtype), None if like.scales is None else scales)

    def _padded(self, scales: torch.Tensor | None, filled: Encoded) -> torch.Tensor | None:
        """Return scales as bytes in rows as long as the regions', which are multiples of 16 bytes."""
        if scales is None or filled.scales is None:
            return None
        flat = scales.contiguous().view(torch.uint8).view(scales.shape[0], -1)
        missing = filled.scales.shape[1] - flat.shape[1]
        return torch.nn.functional.pad(flat, (0, missing)) if missing else flat

    def _weighted(
        self, staging: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, frame: int
    ) -> torch.Tensor:  # fmt: skip
        """Multiply rows by their weights in float32, rounded once, into our region."""
        torch.mul(rows, weights[:, None], out=staging)
        num_rows = self._counts.num_live_rows(frame).to(torch.int64)
        self._words.word("staged_bytes").add_(num_rows * self._plan.token_row_bytes)
        return staging

    def _pull(
        self, place: Place, rows: torch.Tensor, out: torch.Tensor | None, weights: torch.Tensor | None = None,
        out_weights: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Bring rows back into `out`, and `weights` into `out_weights`, or into nothing.

        The library writes both for each token that it was given, zeros for one without an expert; a rank without
        tokens has given it one.
        """
        handle = self._handles[place.frame]
        if out is not None and not out.shape[0]:
            out = None
        dense = out if out is not None and out.is_contiguous() else rows.new_empty((handle.num_rows, rows.shape[1]))
        if weights is not None and (out_weights is None or not out_weights.shape[0]):
            out_weights = torch.empty((handle.num_rows, self._config.num_topk), device=self._device)
        handle.combine(rows, dense, weights, out_weights)
        if out is not None and dense is not out:
            out.copy_(dense)

    def _warm_up(self, group: Group) -> None:
        """Run every kernel once, with no token: the library compiles each at its first launch, which no capture may."""
        place = Place(0, 0)
        token = self._recv[0]
        no_ids = self._counts.sent_ids(0, 0)
        steps: list[Callable[[], object]] = [
            lambda: self._handles[0].update(self._or_no_ids(no_ids)),
            lambda: self._handles[0].dispatch(
                self._no_rows(token, 1), self._no_weights[:1], token, self._recv_weights[0]
            ),
            lambda: self._pull(place, self._expert_out[0], self._expert_out[0][:0]),
        ]
        if self._grads:
            into = Encoded(self._grads[0])
            pulled = self._grad_rows[0]
            steps += [
                lambda: self._handles[0].dispatch(self._no_rows(into, 1), None, into, None),
                lambda: self._pull(place, pulled, pulled[:0], self._grad_weights[0], None),
            ]
        with torch.no_grad():
            self._lib.all_gather(self._count_rows[0], self._rank)
            for step in steps:
                step()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                group.barrier()  # nobody waits on the device for a rank that is still compiling


def _received(regions: RegionTensors) -> list[Encoded]:
    """Return the regions that dispatches fill, by frame, or by forward workspace where they lie there."""
    data = regions.all("recv_tokens")
    scales: list[torch.Tensor | None] = [*regions.all("recv_scales")]
    return [
        Encoded(rows, None if of is None else of.view(torch.uint8).view(rows.shape[0], -1))
        for rows, of in zip(data, scales or [None] * len(data), strict=True)
    ]


def _source(given: Rows, region: torch.Tensor) -> torch.Tensor:
    """Return the rows that a backward reads: a tensor, our region, or zeros, which are written there."""
    if given.tensor is not None:
        return given.tensor
    return region if given.in_window else region.zero_()
