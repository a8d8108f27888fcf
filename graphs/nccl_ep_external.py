"""Call NCCL EP by hand on a window that epbuf manages: the plan, leases, holds and the guard are epbuf's, the rest not.

    torchrun --nproc-per-node 4 graphs/nccl_ep_external.py

Received rows, gradients and the handle's memory are regions of an external arena. One captured step runs forward and
backward; replays bring routings that the capture never saw. At the end a backward that is replayed without its forward
raises. Needs the extra nccl-ep, and CUDA; ranks may share a GPU under CUDA MPS, with NCCL >= 2.30.4 preloaded.

Expert e multiplies its rows by e + 1, so y[t] = x[t] * sum over k of (topk_idx[t, k] + 1), and dx the same of dy.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import epbuf
from epbuf.engines.nccl_ep_library import missing

NUM_TOPK, HIDDEN, MAX_TOKENS, ALIGNMENT = 4, 512, 64, 16
DEVICE = "cuda"


class NcclEp:
    """The library's group, and a handle for each frame in that frame's own memory.

    Source: nccl-extensions 0.1.0 (nccl.ep) and nccl4py 0.6.0 (nccl.core).
    """

    def __init__(self, arena: epbuf.Arena, num_sms: int) -> None:
        core, self.ep = importlib.import_module("nccl.core"), importlib.import_module("nccl.ep")
        self.bindings = importlib.import_module("nccl._extensions.bindings.nccl_ep")
        ep, config, rank = self.ep, arena.plan.config, dist.get_rank()
        identity = [bytes(core.get_unique_id().as_bytes) if rank == 0 else b""]
        dist.broadcast_object_list(identity, 0)
        unique_id = core.UniqueId.from_bytes(identity[0])
        self.comm = core.Communicator.init(nranks=config.num_ranks, rank=rank, unique_id=unique_id)
        self.group = ep.Group.create(
            self.comm,
            ep.GroupConfig(
                algorithm=ep.Algorithm.HIGH_THROUGHPUT, num_experts=config.num_experts, num_topk=config.num_topk,
                max_dispatch_tokens_per_rank=config.max_tokens_per_rank, max_recv_tokens_per_rank=arena.capacity_rows,
                max_token_bytes=arena.plan.nccl_ep_token_bytes, max_num_sms=num_sms,
                zero_copy=ep.ZeroCopyMode.OFF, overflow_policy=ep.OverflowPolicy.DROP,
            ),
        )  # fmt: skip
        self.backward = (
            ep.DispatchConfig(pass_direction=ep.PassDir.BWD),
            ep.CombineConfig(pass_direction=ep.PassDir.BWD),
        )
        self.handles: dict[int, Any] = {}

    def handle(self, lease: epbuf.Lease) -> Any:
        """Return the handle of a lease's frame; made once, which no capture may do."""
        if lease.frame not in self.handles:
            form = self.ep.HandleConfig(dispatch_output_per_expert_alignment=ALIGNMENT)
            layout, memory = int(self.ep.Layout.EXPERT_MAJOR), self.ep.Tensor(lease.nccl_ep_handle)
            pointer = self.bindings.init_handle(self.group.ptr, layout, form._lowpp.ptr, NUM_TOPK, memory.ptr)
            self.handles[lease.frame] = self.ep.Handle(pointer)
        return self.handles[lease.frame]

    def destroy(self) -> None:
        for handle in self.handles.values():
            handle.destroy()
        self.group.destroy()
        self.comm.destroy()


class Layer(torch.autograd.Function):
    """Dispatch, experts and combine, each way between `begin` and `end` of its use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, topk_idx: Tensor, weights: Tensor, lease: epbuf.Lease, lib: NcclEp) -> Tensor:
        ep, stream = lib.ep, current_stream()
        lease.begin("forward")
        handle = lib.handle(lease)
        counts, total = lease.counts[: lease.offs.shape[0]], lease.counts[-1:]
        info = ep.LayoutInfo(expert_counters=ep.Tensor(counts), recv_total_counter=ep.Tensor(total))
        handle.update(ep.Tensor(topk_idx), layout_info=info, stream=stream)
        lease.offs.copy_(counts.cumsum(0))
        handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(x), topk_weights=ep.Tensor(weights)),
            ep.DispatchOutputs(
                tokens=ep.Tensor(lease.recv_tokens), topk_weights=ep.Tensor(lease.recv_topk_weights)
            ),
            stream=stream,
        )  # fmt: skip
        torch.mul(lease.recv_tokens, factors(lease), out=lease.expert_out)
        y = torch.zeros_like(x)
        handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(lease.expert_out)), ep.CombineOutputs(tokens=ep.Tensor(y)), stream=stream
        )
        lease.end("forward", total_recv_tokens=total)
        ctx.lease, ctx.lib, ctx.handle = lease, lib, handle
        ctx.save_for_backward(lease.ticket)  # keeps the frame until this node is gone
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ep, lease, stream = ctx.lib.ep, ctx.lease, current_stream()
        _ = ctx.saved_tensors
        lease.begin("backward")
        dispatch_backward, combine_backward = ctx.lib.backward
        ctx.handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(dy.contiguous())),
            ep.DispatchOutputs(tokens=ep.Tensor(lease.grad_expert_out)), config=dispatch_backward, stream=stream,
        )  # fmt: skip
        torch.mul(lease.grad_expert_out, factors(lease), out=lease.grad_recv_tokens)
        dx, dw = torch.zeros_like(dy), dy.new_zeros(dy.shape[0], NUM_TOPK, dtype=torch.float32)
        ctx.handle.combine(
            ep.CombineInputs(
                tokens=ep.Tensor(lease.grad_recv_tokens), topk_weights=ep.Tensor(lease.grad_recv_topk_weights.zero_())
            ),
            ep.CombineOutputs(tokens=ep.Tensor(dx), topk_weights=ep.Tensor(dw)), config=combine_backward, stream=stream,
        )  # fmt: skip
        lease.end("backward")
        return dx, None, None, None, None


def current_stream() -> Any:
    """Return the stream that the library's kernels go to."""
    return torch.cuda.current_stream() if DEVICE == "cuda" else None


def drain() -> None:
    """Wait for this rank's device and for all ranks."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def factors(lease: epbuf.Lease) -> Tensor:
    """Return e + 1 for each row; rows past the last zone get some factor.

    Shapes: [C, 1] bf16.
    """
    num_local = lease.offs.shape[0]
    row = torch.arange(lease.recv_tokens.shape[0], device=lease.offs.device)
    zone = torch.searchsorted(lease.offs, row, right=True).clamp(max=num_local - 1)
    return (dist.get_rank() * num_local + zone + 1)[:, None].bfloat16()


def draw_inputs(num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw x, topk_idx, weights and dy: small whole numbers, so that results are exact."""
    ids = torch.rand(MAX_TOKENS, num_experts, device=DEVICE).topk(NUM_TOPK).indices
    x, dy = (torch.randint(-2, 3, (MAX_TOKENS, HIDDEN), device=DEVICE).bfloat16() for _ in range(2))
    return x, ids, torch.ones(MAX_TOKENS, NUM_TOPK, device=DEVICE), dy


def run(num_replays: int, num_sms: int) -> None:
    """Capture a step, replay it with new inputs and compare; then reuse a frame early."""
    num_ranks = dist.get_world_size()
    config = epbuf.EpConfig(
        num_ranks=num_ranks, num_experts=4 * num_ranks, num_topk=NUM_TOPK, hidden=HIDDEN,
        max_tokens_per_rank=MAX_TOKENS, expert_alignment=ALIGNMENT,
    )  # fmt: skip
    plan = epbuf.Plan.build(config, engine="nccl_ep")
    with epbuf.Arena.open(plan, dist.group.WORLD, device=DEVICE, window="own", engine="external") as arena:
        lib = NcclEp(arena, num_sms)

        def step(x: Tensor, ids: Tensor, weights: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
            x = x.clone().requires_grad_()
            with arena.acquire() as lease:
                y = Layer.apply(x, ids, weights, lease, lib)
            return y.detach(), torch.autograd.grad(y, x, dy)[0]

        captured = epbuf.CapturedStep.capture(arena, step, draw_inputs(config.num_experts))
        for replay in range(num_replays):
            x, ids, weights, dy = draw_inputs(config.num_experts)
            y, dx = captured(x, ids, weights, dy)
            gate = (ids + 1).sum(1, keepdim=True).float()
            assert torch.equal(y.float(), (x.float() * gate).bfloat16().float()), f"y of replay {replay}"
            assert torch.equal(dx.float(), (dy.float() * gate).bfloat16().float()), f"dx of replay {replay}"
            if dist.get_rank() == 0:
                print(f"replay {replay}: new routing, right result, at {y.data_ptr():#x}")
        captured.check()
        if dist.get_rank() == 0:
            print(f"demand at most {arena.report()['demand_peak_rows']} of {arena.capacity_rows} rows")
        captured.close()
        reuse_early(arena, lib)
        drain()
        lib.destroy()


def reuse_early(arena: epbuf.Arena, lib: NcclEp) -> None:
    """Capture forward and backward apart and replay the backward twice: the second finds its forward's frame used."""
    x, ids, weights, dy = draw_inputs(arena.plan.config.num_experts)
    lease, kept = arena.acquire(), []

    def forward(x: Tensor) -> Tensor:
        kept[:] = [x.clone().requires_grad_()]
        kept.append(Layer.apply(kept[0], ids, weights, lease, lib))
        return kept[1].detach()

    def backward(dy: Tensor) -> Tensor:
        return torch.autograd.grad(kept[1], kept[0], dy, retain_graph=True)[0]

    first = epbuf.CapturedStep.capture(arena, forward, (x,), warmup=1)
    second = epbuf.CapturedStep.capture(arena, backward, (dy,), warmup=0)
    first(x), second(dy)
    second.check()
    second(dy)
    try:
        second.check()
    except epbuf.errors.LeaseError as error:
        if dist.get_rank() == 0:
            print(f"a frame used early is refused, as it must be: {str(error)[:90]}...")
    else:
        raise SystemExit("a frame was used early, and nobody noticed")
    kept.clear()
    lease.release()
    first.close(), second.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run on the ranks that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=4)
    parser.add_argument("--sms", type=int, default=16, help="multiprocessors of the library's kernels, a rank")
    options = parser.parse_args(argv)
    if options.replays < 1:
        parser.error(f"--replays {options.replays}: give at least 1")
    if missing():
        parser.error(missing())
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        parser.error("NCCL EP wants two ranks or more: torchrun --nproc-per-node 4 graphs/nccl_ep_external.py")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    run(options.replays, options.sms)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the library's threads outlive an orderly exit of Python


if __name__ == "__main__":
    sys.exit(main())
