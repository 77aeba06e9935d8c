"""A layer of the encoder on a packed batch in half precision, on an NVIDIA or AMD GPU: few passes over memory.

Beside its matrix products and attention, a layer is limited by memory: biases, dropout, residual connections, layer
normalisation and GELU, the same backward, casts of weights, and sums for the gradients of biases. Here each product is
followed by one Triton kernel that does all of that at once. States between layers, and their gradients, stay in
float32 as under autocast: in half precision they cost several times the error of all other roundings together where
a layer changes its input by little.

This file travels to the Hub with a model: it may import its neighbours and published libraries only. Letters in
shapes: S tokens of all sentences together, H hidden size, I intermediate size, A attention heads, D = H / A, P
programs of `fused_kernels` that sum rows, C numbers in all vectors of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from transformers.activations import GELUActivation

from .fused_kernels import WIDEST, add_norm, add_norm_backward, gelu, gelu_backward, shares, sum_rows, total
from .packing import Packing
from .short_attention import backward_kernel, drawn_seed, forward_kernel, launch
from .short_attention import fits as attention_fits
from .step_weights import as_one, destination_of, half_of


def fits(layer: Any, states: Tensor, packing: Packing) -> bool:
    """Whether `fused_layer` computes this `MinBertLayer`, as it is now, for these states, [1, S, H]."""
    if torch.compiler.is_compiling() or not _has_kernels(states.device):
        return False
    attention, parts = layer.attention.self, [module for module in layer.modules() if module is not layer]
    weighted = [module for module in parts if isinstance(module, nn.Linear | nn.LayerNorm)]
    activation = layer.intermediate.activation
    width, wide = states.shape[-1], layer.intermediate.dense.weight.shape[0]
    return (
        _compute_dtype(states) in (torch.float16, torch.bfloat16)
        and attention.config._attn_implementation != "eager"  # whose passes may be differentiated twice
        and not (layer.gradient_checkpointing and layer.training)
        and attention_fits(states.new_empty(0, attention.head_size), packing.longest)
        and width <= WIDEST
        and 0 < states.shape[1] * max(3 * width, wide) < 2**31  # places are 32-bit numbers
        and type(activation) is GELUActivation
        and activation.act is F.gelu
        and sum(type(module) in (nn.Linear, nn.LayerNorm, nn.Dropout) for module in parts) == 10  # and no subclasses
        and all(module.bias is not None for module in weighted)
        and not any(map(_is_watched, parts))
    )


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody wants to see, or has changed, what a module computes."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _compute_dtype(states: Tensor) -> torch.dtype:
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def fused_layer(layer: Any, states: Tensor, packing: Packing) -> Tensor:
    """What a `MinBertLayer` makes of packed states, [1, S, H], where `fits` says so.

    It can be differentiated once. With dropout, each call draws a seed from torch's generator of the device, and the
    backward pass makes the same masks again from it.
    """
    first, second, attention = layer.attention.output, layer.output, layer.attention.self
    linear = [attention.query, attention.key, attention.value, first.dense, layer.intermediate.dense, second.dense]
    matrices = [module.weight for module in linear]
    biases = [module.bias for module in linear]
    vectors = [
        *biases[:4], first.LayerNorm.weight, first.LayerNorm.bias,
        *biases[4:], second.LayerNorm.weight, second.LayerNorm.bias,
    ]  # fmt: skip
    dtype, hidden = _compute_dtype(states), states.shape[-1]
    plan = _Plan(
        dtype=dtype,
        heads=hidden // attention.head_size,
        starts=packing.starts,
        longest=packing.longest,
        scaling=attention.scaling,
        dropout=attention.attention_dropout if attention.training else 0.0,
        dropouts=tuple(part.dropout.p if part.dropout.training else 0.0 for part in (first, second)),
        epsilons=(first.LayerNorm.eps, second.LayerNorm.eps),
    )
    halves = [half_of(weight, dtype) for weight in matrices]
    weights = (
        *(_stacked(halves[:3]), _stacked([half_of(bias, dtype) for bias in biases[:3]]), *halves[3:]),
        *(vector.detach() for vector in vectors[3:]),
    )
    tokens, wide = states.shape[1], len(biases[4])
    programs, _ = shares(tokens, hidden, states.device)
    widths = (hidden, 3 * hidden, hidden, hidden, hidden, wide, wide, hidden)  # of each product's input and output
    shapes = [*((tokens, width) for width in widths), (programs, sum(map(len, vectors)))]
    destinations = [destination_of(parameter) for parameter in (*matrices, *vectors)]
    carriers = _Weights.apply(dtype, shapes, destinations, *matrices, *vectors)
    output, half = _Layer.apply(plan, weights, _half_beside(states, dtype), states[0].contiguous(), *carriers)
    if not torch.is_autocast_enabled(states.device.type):
        return output[None].to(states.dtype)  # as torch's LayerNorm
    output = output[None]
    if not output.is_inference():  # such tensors do not count their changes
        vars(output)["half"] = half, output._version
    return output


def _half_beside(states: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The copy in half precision that the layer before has written, if nobody has changed the states since."""
    half, version = vars(states).get("half", (None, 0))
    return half if half is not None and half.dtype == dtype and version == states._version else None


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Joined along the first dimension; without a copy where they are contiguous in one array."""
    whole = as_one(tensors)
    return torch.cat([*tensors]) if whole is None else whole


@dataclass(frozen=True)
class _Plan:
    """What a call of a layer computes with, beside tensors with gradients. `dropouts` are those of both outputs."""

    dtype: torch.dtype
    heads: int
    starts: Tensor
    longest: int
    scaling: float
    dropout: float
    dropouts: tuple[float, ...]
    epsilons: tuple[float, float]


# ---- The layer as two nodes of autograd's graph --------------------------------------------------------------------


class _Weights(Function):
    """The parameters of a layer in the graph.

    They are a node of their own because autograd runs it only for a backward pass that asks for a parameter. The
    search of an adversarial term asks for inputs alone: it must compute no weight gradient, and add none to memory.
    `ctx.needs_input_grad` of the layer's own node would not tell: it says what was so in the forward pass.

    To the layer it hands carriers, tensors without memory. Their "gradients", which the layer returns, are what weight
    gradients are made of: of each product its input and the gradient of its output, and the sums of P programs over
    rows for all vectors, [P, C].
    """

    @staticmethod
    def forward(
        ctx: Any,
        dtype: torch.dtype,
        shapes: Sequence[tuple[int, ...]],
        destinations: Sequence[Tensor | None],
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.destinations, device = destinations, parameters[0].device
        *halves, sums = shapes
        carriers = [torch.empty(1, dtype=dtype, device=device).expand(shape) for shape in halves]
        return *carriers, torch.empty(1, device=device).expand(sums)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        *pairs, sums = given
        wanted, to, found = ctx.needs_input_grad[3:], ctx.destinations, []
        with torch.autocast(sums.device.type, enabled=False):
            for inputs, slopes in zip(pairs[::2], pairs[1::2], strict=True):
                place = slice(len(found), len(found) + (1 if found else 3))  # query, key and value have one input
                found += _matrix_gradients(inputs, slopes, wanted[place], to[place])
            hidden, wide = pairs[0].shape[1], pairs[5].shape[1]
            sizes = [hidden] * 6 + [wide] + [hidden] * 3
            found += _vector_gradients(sums, sizes, wanted[6:], to[6:])
        return None, None, None, *found


def _matrix_gradients(
    given: Tensor, slopes: Tensor, wanted: Sequence[bool], to: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of n matrices [N, K] that multiply the same input; `None` if not wanted, or added to their memory.

    Args:
        given: the input, [S, K].
        slopes: the gradients of the outputs beside each other, [S, n * N].
    """
    memory = [one for one in to if one is not None]
    if all(wanted) and len(memory) == len(to) and (whole := as_one(memory)) is not None:
        _add_product(whole, slopes.T, given)
        return [None] * len(to)
    if all(wanted) and not memory:
        return [*_product(slopes.T, given).chunk(len(to))]
    found: list[Tensor | None] = []
    for part, one, destination in zip(slopes.T.chunk(len(to)), wanted, to, strict=True):
        found.append(_product(part, given) if one and destination is None else None)
        if one and destination is not None:
            _add_product(destination, part, given)
    return found


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices in half precision, in float32."""
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else torch.mm(left.float(), right.float())


def _add_product(to: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the same to a matrix, in place; in the product's own kernel on a GPU."""
    if left.is_cuda:
        torch.addmm(to, left, right, out_dtype=to.dtype, out=to)
    else:
        to += _product(left, right)


def _vector_gradients(
    sums: Tensor, sizes: Sequence[int], wanted: Sequence[bool], to: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of biases, scales and shifts of these sizes, from the sums of P programs, [P, C]."""
    memory = [one for one in to if one is not None]
    if all(wanted) and len(memory) == len(to) and (whole := as_one(memory)) is not None:
        total(sums, whole)
        return [None] * len(to)
    found: list[Tensor | None] = []
    for part, one, destination in zip(total(sums).split(sizes), wanted, to, strict=True):
        found.append(part if one and destination is None else None)
        if one and destination is not None:
            destination += part
    return found


class _Layer(Function):
    """The layer's computation, [S, H] to float32 [S, H], and the same in half precision as a constant.

    What its backward pass hands to `_Weights` is said there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        weights: tuple[Tensor, ...],
        half: Tensor | None,
        states: Tensor,
        *carriers: Tensor,
    ) -> tuple[Tensor, Tensor]:
        attention, attention_bias, mixing, widening, narrowing, *vectors = weights
        bias, scale, shift, wide_bias, last_bias, last_scale, last_shift = vectors
        seed = drawn_seed(states.device) if plan.dropout or any(plan.dropouts) else None
        with torch.autocast(states.device.type, enabled=False):
            half = states.to(plan.dtype) if half is None else half
            joined = F.linear(half, attention, attention_bias)  # [S, 3H]
            mixed, log_sums = _attend(plan, joined, seed)
            product = torch.mm(mixed, mixing.T)
            norm = (scale, shift, plan.epsilons[0], seed, 1, plan.dropouts[0])
            attended, attended_half, normal, inverse = add_norm(product, bias, states, *norm)
            widened = torch.mm(attended_half, widening.T)  # [S, I]
            active = gelu(widened, wide_bias)
            product = torch.mm(active, narrowing.T)
            norm = (last_scale, last_shift, plan.epsilons[1], seed, 2, plan.dropouts[1])
            output, output_half, last_normal, last_inverse = add_norm(product, last_bias, attended, *norm)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.mark_non_differentiable(output_half)
        ctx.save_for_backward(
            half, joined, mixed, log_sums, attended_half, normal, inverse, widened, active, last_normal, last_inverse,
            seed, attention, mixing, widening, narrowing, scale, wide_bias, last_scale,
        )  # fmt: skip
        return output, output_half

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Any, ...]:
        slope, _ = given
        if torch.is_grad_enabled():  # by `create_graph`: what comes out would look like a constant
            raise RuntimeError(
                "The fused layer can be differentiated once. For gradients of gradients, load the model with "
                '`attn_implementation="eager"`.'
            )
        (
            half, joined, mixed, log_sums, attended_half, normal, inverse, widened, active, last_normal, last_inverse,
            seed, attention, mixing, widening, narrowing, scale, wide_bias, last_scale,
        ) = ctx.saved_tensors  # fmt: skip
        plan, hidden = ctx.plan, half.shape[1]
        last = 6 * hidden + widened.shape[1]  # where the last output's bias begins among all vectors
        with torch.autocast(slope.device.type, enabled=False):
            programs, _ = shares(*half.shape, half.device)
            sums = slope.new_empty(programs, last + 3 * hidden)
            of_norm = (last_normal, last_inverse, last_scale, seed, 2, plan.dropouts[1], plan.dtype, sums, last)
            of_attended, of_last = add_norm_backward(slope.contiguous(), None, *of_norm)
            of_widened = gelu_backward(torch.mm(of_last, narrowing), widened, wide_bias, hidden, sums, 6 * hidden)
            of_norm = (normal, inverse, scale, seed, 1, plan.dropouts[0], plan.dtype, sums, 3 * hidden)
            of_states, of_first = add_norm_backward(of_attended, torch.mm(of_widened, widening), *of_norm)
            of_joined = _attend_backward(plan, torch.mm(of_first, mixing), joined, mixed, log_sums, seed)
            if ctx.needs_input_grad[3]:
                _add_product(of_states, of_joined, attention)
            sum_rows(of_joined, hidden, sums, 0)
        of_weights = (half, of_joined, mixed, of_first, attended_half, of_widened, active, of_last, sums)
        return None, None, None, of_states, *of_weights


def _attend(plan: _Plan, joined: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mixed values [S, H], and what the backward pass needs of the softmax [S, A], from query, key and value."""
    query, key, value = _apart(plan, joined)
    mixed, log_sums = torch.empty_like(query), joined.new_empty(len(joined), plan.heads, dtype=torch.float32)
    states = (query, key, value, mixed, log_sums)
    given = (plan.starts, seed, plan.longest, plan.dropout, plan.scaling)
    launch(forward_kernel, states, query, *given)
    return mixed.flatten(1), log_sums


def _attend_backward(
    plan: _Plan, slope: Tensor, joined: Tensor, mixed: Tensor, log_sums: Tensor, seed: Tensor | None
) -> Tensor:
    """The gradients of query, key and value beside each other, [S, 3H]."""
    slopes = torch.empty_like(joined)
    query, key, value = _apart(plan, joined)
    states = (slope, query, key, value, mixed, log_sums, *_apart(plan, slopes))
    given = (plan.starts, seed, plan.longest, plan.dropout, plan.scaling)
    launch(backward_kernel, states, query, *given)
    return slopes


def _apart(plan: _Plan, joined: Tensor) -> tuple[Tensor, ...]:
    """[S, 3H] -> three times [S, A, D], in rows of 3 * A heads."""
    return joined.unflatten(1, (3 * plan.heads, -1)).split(plan.heads, dim=1)
