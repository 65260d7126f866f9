"""Xing 4.0 in torch, for the reference logits: DeepSeek V3's blocks between connections.

transformers has no class for it. The formulas of connections are those that vLLM, SGLang and
llama.cpp share. T = tokens, n = residual streams of each.
"""

from typing import Any

import torch

Shapes = dict[str, tuple[int, ...]]
KINDS = ("attn_hc", "ffn_hc")
OWN = ("hc_mult", "hc_eps", "hc_sinkhorn_iters", "mhc_h_res_clamp_min", "mhc_h_res_clamp_max")


def body_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the blocks, for transformers."""
    kept = {key: value for key, value in config.items() if key not in OWN}
    return {**kept, "model_type": "deepseek_v3"}


def connection_shapes(config: dict[str, Any]) -> Shapes:
    """Tensors of all connections."""
    n, hidden = config["hc_mult"], config["hidden_size"]
    rows = n * (n + 2)
    sizes: Shapes = {"hc_fn": (rows, n * hidden), "hc_base": (rows,), "hc_scale": (3,)}
    return {
        f"model.layers.{layer}.{kind}.{name}": shape
        for layer in range(config["num_hidden_layers"])
        for kind in KINDS
        for name, shape in sizes.items()
    }


class WithConnections(torch.nn.Module):
    """A DeepSeek V3 whose layers read and write streams."""

    def __init__(self, config: dict[str, Any], body: torch.nn.Module, tensors: dict) -> None:
        super().__init__()
        self.settings, self.body = config, body
        self.tensors = {name: torch.tensor(tensors[name]) for name in connection_shapes(config)}

    def forward(self, ids: torch.Tensor) -> Any:
        """ids (1, T) -> an object with logits (1, T, vocab_size)."""
        model, count = self.body.model, ids.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        x = model.embed_tokens(ids)[0][:, None].repeat(1, self.settings["hc_mult"], 1)
        rope = model.rotary_emb(x[None, :, 0], positions)
        for index, layer in enumerate(model.layers):

            def attend(y: torch.Tensor, layer: Any = layer) -> torch.Tensor:
                normed = layer.input_layernorm(y)[None]
                return layer.self_attn(
                    normed, position_embeddings=rope, attention_mask=mask, position_ids=positions
                )[0][0]

            def feed(y: torch.Tensor, layer: Any = layer) -> torch.Tensor:
                return layer.mlp(layer.post_attention_layernorm(y)[None])[0]

            x = self.connected(f"model.layers.{index}.attn_hc", x, attend)
            x = self.connected(f"model.layers.{index}.ffn_hc", x, feed)
        logits = self.body.lm_head(model.norm(x.mean(1)))
        return type("Output", (), {"logits": logits[None]})

    def connected(self, path: str, x: torch.Tensor, block: Any) -> torch.Tensor:
        """Streams x (T, n, hidden) around a block of (T, hidden)."""
        weight, base, scale = (self.tensors[f"{path}.hc_{p}"] for p in ("fn", "base", "scale"))
        n, settings = x.shape[1], self.settings
        flat = x.flatten(1)
        normed = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + settings["rms_norm_eps"])
        read, write, mix = (normed @ weight.T).split([n, n, n * n], -1)
        of_read, of_write, of_mix = base.split([n, n, n * n])
        read = torch.sigmoid(read * scale[0] + of_read)
        write = 2 * torch.sigmoid(write * scale[1] + of_write)
        ends = settings["mhc_h_res_clamp_min"], settings["mhc_h_res_clamp_max"]
        mix = (mix * scale[2] + of_mix).clamp(*ends).view(-1, n, n)
        mix = torch.exp(mix - mix.amax(-1, keepdim=True))
        for _ in range(settings["hc_sinkhorn_iters"]):
            mix = mix / (mix.sum(2, keepdim=True) + settings["hc_eps"])
            mix = mix / (mix.sum(1, keepdim=True) + settings["hc_eps"])
        y = block((read[..., None] * x).sum(1))
        return write[..., None] * y[:, None] + mix @ x
