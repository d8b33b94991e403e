"""WhiteMatter written a second time, slowly: the oracle of the model's tests.

Nothing here is shared with wm_ds.model. One token, one layer, one channel and one head at a time, in the
precision of the parameters that are given (the tests give float64), with plain autograd. The names of the
parameters are those of WhiteMatterForCausalLM.state_dict().

Letters: L layers, D width, k channels, d head width, i token, l layer, j channel, h head.

A schedule is a list of steps; a step is a list of (position, pass) pairs that are updated together: all of
them read the pool as it was before the step, then all of them rewrite their entry. Passes count from 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

Step = list[tuple[int, int]]
Entry = tuple[list[list[Tensor]], list[list[Tensor]]]  # keys[j][h], values[j][h], each [d]


@dataclass(frozen=True)
class Settings:
    """Sizes of the model; `router` says how channel weights come about (see `mixing_weights`)."""

    layers: int
    channels: int
    stride: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    router: str = "dynamic"  # or "static" (bias only), "softmax" (softmax of the bias), "fixed" (pattern)
    pattern: tuple[tuple[float, ...], ...] = ()  # the weights [k][L] of router "fixed"


# ---------------------------------------------------------------------------------------------- pieces


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(x_d: Tensor, position: int, theta: float) -> Tensor:
    """RoPE in the half-rotation convention: dimension m turns together with dimension m + d/2."""
    d = x_d.shape[0]
    out: list[Tensor] = [x_d[0]] * d
    for m in range(d // 2):
        angle = torch.tensor(position, dtype=torch.float64) * theta ** (-2.0 * m / d)
        cos, sin = torch.cos(angle).to(x_d), torch.sin(angle).to(x_d)
        a, b = x_d[m], x_d[m + d // 2]
        out[m] = a * cos - b * sin
        out[m + d // 2] = b * cos + a * sin
    return torch.stack(out)


def split_heads(x: Tensor, heads: int) -> list[Tensor]:
    d = x.shape[0] // heads
    return [x[h * d : (h + 1) * d] for h in range(heads)]


def attend(query_d: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    scores = torch.stack([(query_d * key).sum() for key in keys]) / query_d.shape[0] ** 0.5
    weights = torch.softmax(scores, dim=0)
    out = torch.zeros_like(values[0])
    for weight, value in zip(weights, values, strict=True):
        out = out + weight * value
    return out


def attention_and_mlp(
    p: dict, s: Settings, layer: int, x: Tensor, position: int, keys: list, values: list
) -> Tensor:
    """One decoder block on one token. keys[t][h], values[t][h]: what the token sees, any order."""
    at = f"model.layers.{layer}."
    normed = rms_norm(x, p[at + "input_layernorm.weight"], s.eps)
    queries = split_heads(p[at + "self_attn.q_proj.weight"] @ normed, s.heads)
    heads = []
    for h in range(s.heads):
        query = rotate(rms_norm(queries[h], p[at + "self_attn.q_norm.weight"], s.eps), position, s.theta)
        kv_head = h // (s.heads // s.kv_heads)
        heads.append(attend(query, [key[kv_head] for key in keys], [value[kv_head] for value in values]))
    x = x + p[at + "self_attn.o_proj.weight"] @ torch.cat(heads)
    normed = rms_norm(x, p[at + "post_attention_layernorm.weight"], s.eps)
    gate = p[at + "mlp.gate_proj.weight"] @ normed
    up = p[at + "mlp.up_proj.weight"] @ normed
    return x + p[at + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


# ------------------------------------------------------------------------------------------------ pool


def router_sources(s: Settings) -> list[int]:
    """Layers that the router reads: every p-th, counted down from the last, in ascending order."""
    sources = []
    layer = s.layers - 1
    while layer >= 0:
        sources.append(layer)
        layer -= s.stride
    return sources[::-1]


def mixing_weights(p: dict, s: Settings, branch: str, normed: list[Tensor]) -> list[list[Tensor]]:
    """alpha[j][layer]: how much of source l goes into channel j."""
    at = f"model.pool.{branch}."
    if s.router == "fixed":
        return [[normed[0].new_tensor(weight) for weight in row] for row in s.pattern]
    alpha = p[at + "router_bias"]
    if s.router == "dynamic":
        alpha = p[at + "router_weight"] @ torch.cat([normed[layer] for layer in router_sources(s)]) + alpha
    rows = [alpha[j * s.layers : (j + 1) * s.layers] for j in range(s.channels)]
    if s.router == "softmax":
        rows = [torch.softmax(row, dim=0) for row in rows]
    return [[row[layer] for layer in range(s.layers)] for row in rows]


def channel_vectors(p: dict, s: Settings, branch: str, states: list[Tensor]) -> list[list[Tensor]]:
    """Steps 1 and 2: projected channels [j][h] of one token, before key norm and rotation."""
    at = f"model.pool.{branch}."
    normed = [rms_norm(states[layer], p[at + "source_norm"][layer], s.eps) for layer in range(s.layers)]
    alpha = mixing_weights(p, s, branch, normed)
    channels = []
    for j in range(s.channels):
        mix = torch.zeros_like(states[0])
        for layer in range(s.layers):
            mix = mix + alpha[j][layer] * normed[layer]
        projected = p[at + "proj"][j] @ rms_norm(mix, p[at + "channel_norm"][j], s.eps)
        channels.append(split_heads(projected, s.kv_heads))
    return channels


def pool(p: dict, s: Settings, states: list[Tensor], position: int) -> Entry:
    """What the cache stores for one token: rotated, normed keys and raw values."""
    keys = channel_vectors(p, s, "key", states)
    for j in range(s.channels):
        for h in range(s.kv_heads):
            head = rms_norm(keys[j][h], p["model.pool.key.head_norm"][j], s.eps)
            keys[j][h] = rotate(head, position, s.theta)
    return keys, channel_vectors(p, s, "value", states)


def dummy(p: dict, s: Settings) -> Entry:
    keys = [[p["model.dummy_key"][j][h] for h in range(s.kv_heads)] for j in range(s.channels)]
    values = [[p["model.dummy_value"][j][h] for h in range(s.kv_heads)] for j in range(s.channels)]
    return keys, values


# ---------------------------------------------------------------------------------------------- tokens


def layer_stack(
    p: dict, s: Settings, x: Tensor, position: int, seen: list[Entry]
) -> tuple[list[Tensor], Tensor]:
    """All layers on one token: the states that enter each layer, and the last layer's output."""
    states = []
    for layer in range(s.layers):
        states.append(x)
        j = layer % s.channels
        x = attention_and_mlp(
            p, s, layer, x, position, [keys[j] for keys, _ in seen], [values[j] for _, values in seen]
        )
    return states, x


def positions_in_document(documents: list[int]) -> list[int]:
    first: dict[int, int] = {}
    positions = []
    for i, document in enumerate(documents):
        first.setdefault(document, i)
        positions.append(i - first[document] if document >= 0 else 0)
    return positions


def visible(documents: list[int], i: int) -> list[int]:
    """Earlier tokens of the same document; a filler token (id -1) sees none and is seen by none."""
    if documents[i] < 0:
        return []
    return [j for j in range(i) if documents[j] == documents[i]]


def hidden(p: dict, s: Settings, final: Tensor) -> Tensor:
    return rms_norm(final, p["model.norm.weight"], s.eps)


def head(p: dict) -> Tensor:
    return p["lm_head.weight"] if "lm_head.weight" in p else p["model.embed_tokens.weight"]


def logits(p: dict, hidden_TD: Tensor) -> Tensor:
    return torch.stack([head(p) @ hidden_TD[i] for i in range(hidden_TD.shape[0])])


def exact(p: dict, s: Settings, tokens: list[int], documents: list[int]) -> Tensor:
    """Autoregressive evaluation of one row, document by document, token by token: hidden states [T, D]."""
    rows: list[Tensor | None] = [None] * len(tokens)
    for document in sorted(set(documents)):
        members = [i for i in range(len(tokens)) if documents[i] == document]
        cache = [dummy(p, s)]
        for position, i in enumerate(members):
            x = p["model.embed_tokens.weight"][tokens[i]]
            if document < 0:
                _, final = layer_stack(p, s, x, 0, [dummy(p, s)])
            else:
                states, final = layer_stack(p, s, x, position, cache)
                cache.append(pool(p, s, states, position))
            rows[i] = hidden(p, s, final)
    return torch.stack(rows)


# ---------------------------------------------------------------------------------------------- passes


@dataclass
class Result:
    hidden_TD: Tensor  # after the final norm
    keys_TkHd: Tensor
    values_TkHd: Tensor


def stack_entries(entries: list[Entry]) -> tuple[Tensor, Tensor]:
    keys = torch.stack([torch.stack([torch.stack(heads) for heads in keys]) for keys, _ in entries])
    values = torch.stack([torch.stack([torch.stack(heads) for heads in values]) for _, values in entries])
    return keys, values


def detach(entry: Entry) -> Entry:
    return tuple([[head.detach() for head in channel] for channel in side] for side in entry)


def blend(old: Entry, new: Entry, factor: float) -> Entry:
    """new = old + factor * (computed - old), for every stored number."""
    if factor == 1.0:
        return new
    return tuple(
        [
            [o + factor * (n - o) for o, n in zip(olds, news, strict=True)]
            for olds, news in zip(a, b, strict=True)
        ]
        for a, b in zip(old, new, strict=True)
    )


@dataclass(frozen=True)
class Start:
    """A layerwise start: what stands in for missing states ("newest" or "embedding"), and whether gradient
    flows through its sweep."""

    missing: str
    grad: bool = False


def layerwise(
    p: dict,
    s: Settings,
    embedded: list[Tensor],
    positions: list[int],
    seen: list[list[int]],
    start: Start,
    cache: list[Entry] | None = None,
) -> list[list[Tensor]]:
    """The states of the sweep of a layerwise start: for each token what enters layers 0 … L-1.

    All tokens go through a layer before any goes through the next one. `seen[i]`: the tokens that token i
    sees, beside the dummy and all entries of `cache`.
    """
    states = [[x] for x in embedded]
    for layer in range(s.layers - 1):
        entries = []
        for i, known in enumerate(states):
            stand_in = known[0] if start.missing == "embedding" else known[-1]
            entries.append(pool(p, s, known + [stand_in] * (s.layers - len(known)), positions[i]))
        j, after = layer % s.channels, []
        for i, known in enumerate(states):
            read = [dummy(p, s), *(cache or []), *(entries[other] for other in seen[i])]
            keys, values = [keys[j] for keys, _ in read], [values[j] for _, values in read]
            after.append(attention_and_mlp(p, s, layer, known[-1], positions[i], keys, values))
        for known, state in zip(states, after, strict=True):
            known.append(state)
    if start.grad:
        return states
    return [[state.detach() for state in known] for known in states]


def passes(
    p: dict,
    s: Settings,
    tokens: list[int],
    documents: list[int],
    steps: list[Step],
    no_grad: int = 0,
    relaxation: dict[int, float] | None = None,
    start: Start | None = None,
) -> Result:
    """Run a schedule over one row.

    `no_grad`: a position's first passes, pass < no_grad, are detached. The pool of the states which the
    last of them leaves (of the start's states, where there is none) is evaluated with gradient: there the
    gradient phase begins. `relaxation[pass]`: how far an entry moves towards its computed value. `start`: a
    layerwise one; by default every state is the embedding.
    """
    relaxation = relaxation or {}
    T = len(tokens)
    positions = positions_in_document(documents)
    embedded = [p["model.embed_tokens.weight"][token] for token in tokens]
    begin = [[x] * s.layers for x in embedded]
    if start is not None:
        seen = [visible(documents, i) for i in range(T)]
        begin = layerwise(p, s, embedded, positions, seen, start)
    first = [pool(p, s, begin[i], positions[i]) for i in range(T)]
    entries = first if no_grad == 0 else [detach(entry) for entry in first]
    finals: list[Tensor | None] = [None] * T
    for step in steps:
        written = []
        for i, number in step:
            seen = [dummy(p, s)] + [entries[j] for j in visible(documents, i)]
            if number < no_grad:
                with torch.no_grad():
                    states, finals[i] = layer_stack(p, s, embedded[i], positions[i], seen)
                    states = [state.detach() for state in states]
                old, new = detach(entries[i]), pool(p, s, states, positions[i])
                if number < no_grad - 1:
                    new = detach(new)
            else:
                states, finals[i] = layer_stack(p, s, embedded[i], positions[i], seen)
                old, new = entries[i], pool(p, s, states, positions[i])
            written.append(blend(old, new, relaxation.get(number, 1.0)))
        for (i, _), entry in zip(step, written, strict=True):
            entries[i] = entry
    keys, values = stack_entries(entries)
    return Result(torch.stack([hidden(p, s, final) for final in finals]), keys, values)


# ---------------------------------------------------------------------------------------------- continuing


def continue_document(
    p: dict,
    s: Settings,
    cache: list[Entry],
    tokens: list[int],
    steps: list[Step],
    start: Start | None = None,
) -> tuple[Tensor, list[Entry]]:
    """More tokens of one document behind the entries of its earlier ones: hidden [T, D], all entries.

    Steps name positions in the document, so the first new token is position len(cache).
    """
    begin = len(cache)
    embedded = [p["model.embed_tokens.weight"][token] for token in tokens]
    states = [[x] * s.layers for x in embedded]
    if start is not None:
        positions = list(range(begin, begin + len(tokens)))
        seen = [list(range(i)) for i in range(len(tokens))]
        states = layerwise(p, s, embedded, positions, seen, start, cache)
    entries = cache + [pool(p, s, known, begin + i) for i, known in enumerate(states)]
    finals: list[Tensor | None] = [None] * len(tokens)
    for step in steps:
        written = []
        for i, _ in step:
            seen = [dummy(p, s), *entries[:i]]
            states, finals[i - begin] = layer_stack(p, s, embedded[i - begin], i, seen)
            written.append(pool(p, s, states, i))
        for (i, _), entry in zip(step, written, strict=True):
            entries[i] = entry
    return torch.stack([hidden(p, s, final) for final in finals]), entries


def from_position(steps: list[Step], begin: int) -> list[Step]:
    """A schedule's steps without the positions before `begin`."""
    kept = [[(i, number) for i, number in step if i >= begin] for step in steps]
    return [step for step in kept if step]


# ------------------------------------------------------------------------------ layers with KV of their own


def own_entry(
    p: dict, s: Settings, layer: int, x: Tensor, position: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values [h] that Qwen3's attention makes of the state entering `layer`."""
    at = f"model.layers.{layer}."
    normed = rms_norm(x, p[at + "input_layernorm.weight"], s.eps)
    keys = split_heads(p[at + "self_attn.k_proj.weight"] @ normed, s.kv_heads)
    keys = [rotate(rms_norm(k, p[at + "self_attn.k_norm.weight"], s.eps), position, s.theta) for k in keys]
    return keys, split_heads(p[at + "self_attn.v_proj.weight"] @ normed, s.kv_heads)


def plain_layer(p: dict, s: Settings, layer: int, x_T: list[Tensor], documents: list[int]) -> list[Tensor]:
    """An ordinary causal layer over a row: every token sees itself and what came before in its document.

    A filler token (id -1) sees itself alone.
    """
    positions = positions_in_document(documents)
    entries = [own_entry(p, s, layer, x, position) for x, position in zip(x_T, positions, strict=True)]
    out = []
    for i, x in enumerate(x_T):
        seen = [entries[j] for j in [*visible(documents, i), i]]
        keys, values = [key for key, _ in seen], [value for _, value in seen]
        out.append(attention_and_mlp(p, s, layer, x, positions[i], keys, values))
    return out


def vanilla(p: dict, s: Settings, tokens: list[int], documents: list[int]) -> Tensor:
    """Qwen3 over one packed row: hidden states [T, D]. It checks the pieces above against transformers."""
    x_T = [p["model.embed_tokens.weight"][token] for token in tokens]
    for layer in range(s.layers):
        x_T = plain_layer(p, s, layer, x_T, documents)
    return torch.stack([hidden(p, s, x) for x in x_T])


# ------------------------------------------------------------------------------------------------- ablation


def own_depth_entry(
    p: dict, s: Settings, layer: int, states: list[Tensor], position: int
) -> tuple[list, list]:
    """Keys and values [h] of channel `layer`, mixed from the states of layers 0 … `layer` alone."""
    sides = []
    for branch in ("key", "value"):
        at = f"model.pool.{branch}."
        normed = [rms_norm(states[m], p[at + "source_norm"][m], s.eps) for m in range(layer + 1)]
        mix = torch.zeros_like(states[0])
        scores = []
        for m in range(layer + 1):
            row = layer * s.layers + m
            alpha = p[at + "router_bias"][row]
            if s.router == "dynamic":
                for block, source in enumerate(router_sources(s)):
                    if source <= layer:
                        weight = p[at + "router_weight"][row].reshape(-1, len(mix))[block]
                        alpha = alpha + (weight * normed[source]).sum()
            scores.append(alpha)
        if s.router == "softmax":
            scores = list(torch.softmax(torch.stack(scores), dim=0))
        for m in range(layer + 1):
            mix = mix + scores[m] * normed[m]
        projected = p[at + "proj"][layer] @ rms_norm(mix, p[at + "channel_norm"][layer], s.eps)
        sides.append(split_heads(projected, s.kv_heads))
    keys, values = sides
    norm = p["model.pool.key.head_norm"][layer]
    return [rotate(rms_norm(key, norm, s.eps), position, s.theta) for key in keys], values


def no_feedback(p: dict, s: Settings, tokens: list[int], documents: list[int]) -> Tensor:
    """§5.3, no deep-to-shallow feedback: ordinary causal attention, itself included: hidden [T, D]."""
    positions = positions_in_document(documents)
    states = [[p["model.embed_tokens.weight"][token]] for token in tokens]
    for layer in range(s.layers):
        entries = [own_depth_entry(p, s, layer, states[i], positions[i]) for i in range(len(tokens))]
        for i in range(len(tokens)):
            seen = [entries[j] for j in [*visible(documents, i), i]]
            keys, values = [key for key, _ in seen], [value for _, value in seen]
            states[i].append(attention_and_mlp(p, s, layer, states[i][-1], positions[i], keys, values))
    return torch.stack([hidden(p, s, state[-1]) for state in states])


# --------------------------------------------------------------------------------------------- LCKV sandwich


def nothing(p: dict, s: Settings, like: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The slot of zeros that every query of a condensed layer sees."""
    return [like.new_zeros(s.head_dim)] * s.kv_heads, [like.new_zeros(s.head_dim)] * s.kv_heads


def lckv(
    p: dict,
    s: Settings,
    tokens: list[int],
    documents: list[int],
    condensed: range,
    steps: list[Step],
    no_grad: int = 0,
) -> Tensor:
    """Warm-up layers with KV of their own, once, around condensed layers that share one KV: hidden [T, D].

    The shared entry of a token comes from the state entering the top condensed layer, and at the start from
    the state that leaves the warm-up layers below. `steps` and `no_grad` as in `passes`.
    """
    positions = positions_in_document(documents)
    x_T = [p["model.embed_tokens.weight"][token] for token in tokens]
    for layer in range(condensed.start):
        x_T = plain_layer(p, s, layer, x_T, documents)
    top = condensed[-1]
    entries = [own_entry(p, s, top, x, position) for x, position in zip(x_T, positions, strict=True)]
    if no_grad:
        entries = [detach_sides(entry) for entry in entries]
    out = list(x_T)
    for step in steps:
        written = []
        for i, number in step:
            seen = [nothing(p, s, x_T[i])] + [entries[j] for j in visible(documents, i)]
            keys, values = [key for key, _ in seen], [value for _, value in seen]
            with torch.set_grad_enabled(number >= no_grad and torch.is_grad_enabled()):
                state = x_T[i]
                for layer in condensed:
                    if layer == top:
                        entering = state
                    state = attention_and_mlp(p, s, layer, state, positions[i], keys, values)
            out[i] = state
            if number < no_grad:
                entering = entering.detach()
            entry = own_entry(p, s, top, entering, positions[i])
            written.append(detach_sides(entry) if number < no_grad - 1 else entry)
        for (i, _), entry in zip(step, written, strict=True):
            entries[i] = entry
    for layer in range(condensed.stop, s.layers):
        out = plain_layer(p, s, layer, out, documents)
    return torch.stack([hidden(p, s, x) for x in out])


def detach_sides(entry: tuple[list[Tensor], list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    keys, values = entry
    return [key.detach() for key in keys], [value.detach() for value in values]


# ------------------------------------------------------------------------------------------- schedules


def cyclic(length: int, groups: int, passes: int) -> list[Step]:
    return [
        [(i, n) for i in range(length) if i % groups == q]
        for n in range(passes)
        for q in range(groups)
        if q < length
    ]


def one_by_one(length: int) -> list[Step]:
    return [[(i, 0)] for i in range(length)]


def chunked(length: int, chunk: int, groups: int, passes: int) -> list[Step]:
    """Cyclic passes inside one contiguous chunk after another; groups count from the chunk's start."""
    steps = []
    for start in range(0, length, chunk):
        inside = cyclic(min(chunk, length - start), groups, passes)
        steps += [[(start + i, n) for i, n in step] for step in inside]
    return steps


def wavefront(length: int, chunk: int, groups: int, passes: int) -> list[Step]:
    """Chunks staggered by one pass: chunk c runs pass t in the same steps as chunk c+1 runs pass t-1."""
    chunks = range(0, length, chunk)
    steps = []
    for wave in range(len(chunks) + passes - 1):
        for q in range(groups):
            step = []
            for c, start in enumerate(chunks):
                number = wave - c
                if 0 <= number < passes:
                    step += [
                        (i, number)
                        for i in range(start, min(start + chunk, length))
                        if (i - start) % groups == q
                    ]
            if step:
                steps.append(step)
    return steps


# -------------------------------------------------------------------------------------------- training


def cross_entropy(p: dict, hidden_TD: Tensor, labels: list[int]) -> Tensor:
    """Sum over the labelled positions (label -100: none) of -log softmax(logits)[label]."""
    total = hidden_TD.new_zeros(())
    for i, label in enumerate(labels):
        if label >= 0:
            row = head(p) @ hidden_TD[i]
            total = total + torch.logsumexp(row, dim=0) - row[label]
    return total
