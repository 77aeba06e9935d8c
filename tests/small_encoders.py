"""Small encoders of the library's, by their `model_type`: those that a model with tasks takes, and others."""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING, AutoModel

SIZES = {
    "vocab_size": 110, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 56,
    "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
#: In the words of other configs.
XLM = {"vocab_size": 110, "emb_dim": 32, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64, "init_std": 0.2,
       "pad_token_id": 0}  # fmt: skip
BUCKETS = {"position_buckets": 8, "position_biased_input": False, "share_att_key": True}
DEBERTA = {**SIZES, "relative_attention": True, "pos_att_type": "p2c|c2p", "type_vocab_size": 0}
ENDS = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
#: Small settings by `model_type`, of those that are taken; the library's older versions lack some.
_TAKEN: dict[str, dict] = {
    "albert": {**SIZES, "embedding_size": 16},
    "big_bird": {**SIZES, "block_size": 4, "num_random_blocks": 1},
    "convbert": {**SIZES, "embedding_size": 32, "conv_kernel_size": 3, "head_ratio": 2},
    "deberta": DEBERTA,
    "deberta-v2": {**DEBERTA, **BUCKETS, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3, "conv_act": "gelu"},
    "esm": {**SIZES, "mask_token_id": 4, "position_embedding_type": "rotary"},
    "eurobert": {**SIZES, **ENDS},
    "flaubert": XLM,
    "gte": {**SIZES, "type_vocab_size": 2},
    "ibert": {**SIZES, "pad_token_id": 1},
    "longformer": {**SIZES, "attention_window": 4, "pad_token_id": 1},
    "luke": {**SIZES, "entity_vocab_size": 10, "entity_emb_size": 16, "pad_token_id": 1},
    "megatron-bert": SIZES,
    "mobilebert": {**SIZES, "embedding_size": 16, "intra_bottleneck_size": 16},
    "modernbert": {**SIZES, **ENDS, "local_attention": 8, "global_attn_every_n_layers": 2},
    "mpnet": {**SIZES, "pad_token_id": 1},
    "nomic_bert": SIZES,
    "nystromformer": {**SIZES, "num_landmarks": 4, "segment_means_seq_len": 4, "conv_kernel_size": 3},
    "rembert": {**SIZES, "input_embedding_size": 16, "output_embedding_size": 16},
    "roberta-prelayernorm": {**SIZES, "pad_token_id": 1},
    "roc_bert": {**SIZES, "pronunciation_vocab_size": 9, "shape_vocab_size": 9},
    "roformer": {**SIZES, "embedding_size": 32},
    "splinter": SIZES,
    "squeezebert": {**SIZES, "embedding_size": 32},
    "xlm": XLM,
    "xlm-roberta-xl": {**SIZES, "pad_token_id": 1},
    "xlnet": {"vocab_size": 110, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 56, "initializer_range": 0.2,
              "pad_token_id": 0},
    "xmod": {**SIZES, "pad_token_id": 1, "languages": ["en_XX", "de_DE"], "default_language": "de_DE"},
}  # fmt: skip
TAKEN = {name: settings for name, settings in _TAKEN.items() if name in CONFIG_MAPPING}
#: Whose answer at a token changes with the padding beside the text, in the library too.
READ_PADDING = {"convbert", "mobilebert", "nystromformer"}
#: Without positions of an end.
ENDLESS = {"xlnet"}


def small(name: str, **changes):
    return CONFIG_MAPPING[name](**{**TAKEN[name], **changes})


def saved(name: str, folder, kind=AutoModel, **changes):
    """A folder with the library's model, random and small, as it saves it."""
    torch.manual_seed(0)
    kind.from_config(small(name, **changes)).save_pretrained(folder)
    return folder


def batch(name: str, lengths=(12, 7, 3)):
    pad = TAKEN[name]["pad_token_id"]
    ids = torch.randint(5, 90, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask + pad * (1 - mask), "attention_mask": mask}
