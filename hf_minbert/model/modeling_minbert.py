"""BERT (Devlin et al. 2019, arXiv:1810.04805) by hand, with one head per task.

Modules carry the parameter names of Hugging Face's BERT, so that every BERT checkpoint loads without a mapping; those
of its relatives are renamed as `families` says. This file travels to the Hub with a model: it may import its
neighbours and published libraries only. Letters in shapes: B examples, T tokens, H hidden size, E embedding size, N
attention heads, D = H / N, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, MaskedLMOutput, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .configuration_minbert import MinBertConfig
from .dropout import drop
from .families import key_mapping
from .heads import Encoded, PerTask, TaskHeads
from .inputs import counted_positions, sentences, taken_apart, tokens_of
from .library import LibraryEncoder, library_key_mapping
from .losses import IGNORED, stock_logits
from .packing import Packing, packed_attention
from .plugins import __name__ as _plugins  # noqa: F401  a saved folder's imports those of the model
from .pooling import SelfInitialized, make_activation
from .saving import plugins_of, save_plugins

#: Arguments of `from_pretrained` that say where a file is read from.
READING = {"cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder"}


class MinBertEmbeddings(nn.Module):
    """Word, position and segment embeddings, summed, normalised and brought to the layers' size."""

    def __init__(self, config: MinBertConfig):
        super().__init__()
        size, self.offset, self.limit = config.word_size, config.position_offset, config.max_position_embeddings
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        padding = self.offset - 1 if self.offset else None
        self.position_embeddings = nn.Embedding(self.offset + self.limit, size, padding_idx=padding)
        segments = config.type_vocab_size
        self.token_type_embeddings = nn.Embedding(segments, size) if segments else None
        self.LayerNorm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.project = None if size == config.hidden_size else nn.Linear(size, config.hidden_size)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        packed: bool = False,
    ) -> Tensor:
        """ids [B, T] (or inputs_embeds [B, T, E]) -> [B, T, H]"""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either `input_ids` or `inputs_embeds`, and not both.")
        if inputs_embeds is None:
            inputs_embeds = self.word_embeddings(input_ids)
        if position_ids is None:
            position_ids = self.positions(input_ids, inputs_embeds.shape[1], inputs_embeds.device)
        # The order of the sum is that of the reference: floating-point addition is not associative.
        summed = inputs_embeds
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(summed.shape[:2], dtype=torch.long, device=summed.device)
            summed = summed + self.token_type_embeddings(token_type_ids)
        summed = summed + self.position_embeddings(position_ids)
        normalised = drop(self.dropout, self.LayerNorm(summed), packed)
        return normalised if self.project is None else self.project(normalised)

    def positions(self, input_ids: Tensor | None, length: int, device: torch.device) -> Tensor:
        """Rows of the position table, [1, T], or [B, T] where they depend on the ids.

        Raises:
            ValueError: the input is longer than the model has positions.
        """
        if length > self.limit:  # on a GPU the look-up would fail much later, and without the numbers
            raise ValueError(
                f"The input is {length} tokens long, but this model has positions for {self.limit}. Truncate the "
                "input."
            )
        if self.offset and input_ids is not None:
            return counted_positions(input_ids, self.offset - 1)
        # Made here, not kept as a buffer: a buffer outside the checkpoint is garbage after from_pretrained.
        return torch.arange(self.offset, self.offset + length, device=device)[None]


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention, written out (Vaswani et al. 2017, arXiv:1706.03762, equation 1).

    Args:
        query, key, value: [B, N, T, D].
        attention_mask: added to the scores, [B, 1, T, T]: 0 where a token may look, very low elsewhere.

    Returns:
        the mixed values [B, T, N, D] and the attention probabilities [B, N, T, T].
    """
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    probabilities = F.dropout(scores.softmax(dim=-1), p=dropout, training=module.training)
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities


class MinBertSelfAttention(nn.Module):
    """Multi-head self-attention in both directions."""

    is_causal = False  # the library's attention functions ask

    def __init__(self, config: MinBertConfig):
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"`hidden_size` must be a multiple of `num_attention_heads`. "
                f"Found {config.hidden_size} and {config.num_attention_heads}."
            )
        self.config = config
        self.head_size = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_size**-0.5
        self.attention_dropout = config.attention_probs_dropout_prob
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packing: Packing | None = None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, H] -> [B, T, H], and the probabilities where the attention function gives them"""
        shape = hidden_states.shape[:-1]
        query, key, value = (
            project(hidden_states).view(*shape, -1, self.head_size).transpose(1, 2)  # [B, N, T, D]
            for project in (self.query, self.key, self.value)
        )
        # The fused functions apply the rate that they are given, in training and in evaluation.
        dropout = self.attention_dropout if self.training else 0.0
        if packing is not None:
            fused = self.config._attn_implementation != "eager"
            mixed = packed_attention(query, key, value, packing, dropout, self.scaling, fused)
            return mixed.reshape(*shape, -1), None
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        mixed, probabilities = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return mixed.reshape(*shape, -1), probabilities


class MinBertAddNorm(nn.Module):
    """A linear layer, dropout, the residual connection and layer normalisation."""

    def __init__(self, config: MinBertConfig, input_size: int, dropout: bool = True):
        super().__init__()
        self.dense = nn.Linear(input_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob if dropout else 0.0)

    def forward(self, output: Tensor, residual: Tensor, packed: bool = False) -> Tensor:
        """[B, T, input_size] and [B, T, H] -> [B, T, H]"""
        return self.LayerNorm(drop(self.dropout, self.dense(output), packed) + residual)


class MinBertAttention(nn.Module):
    """Self-attention followed by its add-and-norm. It exists for the checkpoint's names."""

    def __init__(self, config: MinBertConfig):
        super().__init__()
        self.self = MinBertSelfAttention(config)
        self.output = MinBertAddNorm(config, config.hidden_size, config.attention_output_dropout)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packing: Packing | None = None, **kwargs
    ) -> Tensor:
        mixed, _ = self.self(hidden_states, attention_mask, packing=packing, **kwargs)
        return self.output(mixed, hidden_states, packed=packing is not None)


class MinBertIntermediate(nn.Module):
    """The widening half of the feed-forward block."""

    def __init__(self, config: MinBertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = make_activation("hidden_act", config.hidden_act)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.dense(hidden_states))


class MinBertLayer(GradientCheckpointingLayer):
    """One layer of the encoder: attention, then feed-forward, each with its add-and-norm."""

    def __init__(self, config: MinBertConfig):
        super().__init__()
        self.attention = MinBertAttention(config)
        self.intermediate = MinBertIntermediate(config)
        self.output = MinBertAddNorm(config, config.intermediate_size)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packing: Packing | None = None, **kwargs
    ) -> Tensor:
        if packing is not None and hidden_states.is_cuda:
            from .fused_layer import fits, fused_layer  # here, because it imports Triton

            if fits(self, hidden_states, packing):
                return fused_layer(self, hidden_states, packing)
        attended = self.attention(hidden_states, attention_mask, packing=packing, **kwargs)
        return self.output(self.intermediate(attended), attended, packed=packing is not None)


class MinBertEncoder(nn.Module):
    """The stack of layers, the last of which may be a task's own."""

    def __init__(self, config: MinBertConfig):
        super().__init__()
        self.layer = nn.ModuleList(MinBertLayer(config) for _ in range(config.num_hidden_layers))
        self.shared = config.num_hidden_layers - config.private_layers
        own = self.layer[self.shared :]
        copying = config.copying_tasks if config.private_layers else ()
        self.private = PerTask({name: start_as(self._copies(config), own) for name in copying})

    def _copies(self, config: MinBertConfig) -> nn.ModuleDict:
        """Private layers under the numbers that they have in the stack: more of them do not rename the others."""
        return nn.ModuleDict({str(n): MinBertLayer(config) for n in range(self.shared, len(self.layer))})

    def layers_of(self, task: str | None) -> list[nn.Module]:
        """The layers that a task's sentences go through; without a task, the encoder's own, those of its owner."""
        private = self.private.get(task)
        return [*self.layer] if private is None else [*self.layer[: self.shared], *private.values()]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        task: str | None = None,
        states: list[Tensor] | None = None,
        **kwargs,
    ) -> Tensor:
        """[B, T, H] -> [B, T, H]; `states` takes in what goes into the first layer, and what comes out of each."""
        if states is not None:
            states.append(hidden_states)
        for layer in self.layers_of(task):
            # By position: activation checkpointing and the recording of hidden states look there.
            hidden_states = layer(hidden_states, attention_mask, **kwargs)
            if states is not None:
                states.append(hidden_states)
        return hidden_states


class MinBertPooler(nn.Module):
    """One vector per example, from its first token."""

    def __init__(self, config: MinBertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, H] -> [B, H]"""
        return torch.tanh(self.dense(hidden_states[:, 0]))


def start_as(copy: nn.Module, original: nn.Module) -> nn.Module:
    """Lets every parameter of `copy` that is not in the checkpoint start as that of `original`.

    When the library initializes what a checkpoint lacks, it has loaded what the checkpoint has.
    """
    for module, source in zip(copy.modules(), original.modules(), strict=True):
        vars(module)["starts_as"] = source  # no submodule: its weights would be saved a second time
    return copy


class MinBertPreTrainedModel(PreTrainedModel):
    """What all MinBERT models share: names, what the library may do with them, and how they are saved."""

    config_class = MinBertConfig
    config: MinBertConfig
    base_model_prefix = "bert"
    supports_gradient_checkpointing = True
    # Our losses are plain means. Without this the stock Trainer takes them for losses already scaled to
    # the accumulated batch, because `forward` has **kwargs, and its gradients come out too large.
    accepts_loss_kwargs = False
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["MinBertEmbeddings", "MinBertLayer"]
    _can_record_outputs = {"hidden_states": MinBertLayer, "attentions": MinBertSelfAttention}

    def __init__(self, config: MinBertConfig):
        super().__init__(config)
        config.check_tasks()  # the config may have been edited since it was made

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SelfInitialized):
            module.init_weights()
        if "starts_as" in vars(module):
            original = vars(module)["starts_as"]
            for name, parameter in module.named_parameters(recurse=False):
                init.copy_(parameter, original.get_parameter(name))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As the library's. Weights on a CPU get memory of their own, aligned as torch allocates it.

        The library leaves them in the mapped file, where a weight starts anywhere. MKL chooses
        kernels by alignment, so that a loaded model's outputs would differ from the saved one's by rounding, on one
        machine and for the same batch (oneAPI MKL Developer Guide, "Obtaining Numerically Reproducible Results").
        """
        config, new_head = kwargs.get("config"), kwargs.get("ignore_mismatched_sizes", False)
        if not isinstance(config, PreTrainedConfig):
            kwargs["new_head"] = new_head  # the library does not tell the config of its argument; the Auto classes do
        elif new_head:
            kwargs["config"] = config = deepcopy(config)  # the caller's stays as it is
            config.settle_labels(new_head=True)
        encoder = cls._encoder_config(pretrained_model_name_or_path, kwargs)
        renames = key_mapping() if encoder is None else library_key_mapping(encoder)
        kwargs["key_mapping"] = {**renames, **(kwargs.get("key_mapping") or {})}
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with `output_loading_info`
        for parameter in model.parameters():
            if parameter.device.type == "cpu":
                parameter.data = parameter.data.clone()
        return loaded

    @classmethod
    def _encoder_config(cls, name: Any, kwargs: dict[str, Any]) -> Any:
        """The `encoder_config` of the model that `from_pretrained` is asked for; `None` for the hand-written one."""
        config = kwargs.get("config")
        if isinstance(config, PreTrainedConfig):
            return config.encoder_config
        where = {key: kwargs[key] for key in READING & kwargs.keys()}
        return MinBertConfig.get_config_dict(config or name, **where)[0].get("encoder_config")

    def save_pretrained(self, save_directory, is_main_process=True, *args, save_original_format=False, **kwargs):
        """As the library's, with three differences.

        Weights keep our names (`save_original_format=False`), so that an old BERT file does not give its
        LayerNorm.gamma and beta to the new one. And `auto_map` names every class, so that all Auto classes
        load the folder without this package, whichever class saved it. And the code of plugins goes along.

        Raises:
            ValueError: `push_to_hub` is given, and the model needs plugins.
        """
        self.config.auto_map = dict(AUTO_MAP)
        plugins = plugins_of(self.config.tasks or (), self.config.plugins or ())
        if plugins and kwargs.get("push_to_hub"):  # which the library does before they are there
            raise ValueError("`push_to_hub` would leave the plugins behind. Call `model.push_to_hub` instead.")
        self.config.plugins = plugins or None
        super().save_pretrained(
            save_directory, is_main_process, *args, save_original_format=save_original_format, **kwargs
        )
        if is_main_process:
            save_plugins(plugins, save_directory)


class MinBertModel(MinBertPreTrainedModel):
    """The encoder, with the pooler unless `add_pooling_layer` is false."""

    # What other BERT models keep beside the encoder, and a buffer that old files carry.
    _keys_to_ignore_on_load_unexpected = [r"^cls\.", r"embeddings\.position_ids$"]

    def __init__(self, config: MinBertConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        if config.encoder_config is not None:
            raise ValueError(
                f"The encoder of this model is the library's ({config.family}), and {type(self).__name__} is the "
                "hand-written one. Load a MinBertForMultiTask (AutoModelForSequenceClassification), whose "
                "`encoder_of(task).model` is that encoder."
            )
        self.embeddings = MinBertEmbeddings(config)
        self.encoder = MinBertEncoder(config)
        self.pooler = MinBertPooler(config) if add_pooling_layer else None
        self.post_init()

    def layers_of(self, task: str | None) -> list[nn.Module]:
        """As `MinBertEncoder.layers_of`."""
        return self.encoder.layers_of(task)

    def positions_of(self, input_ids: Tensor) -> Tensor | None:
        """As `MinBertForMultiTask.positions_of`."""
        own = self.embeddings
        return own.positions(input_ids, input_ids.shape[-1], input_ids.device) if own.offset else None

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value) -> None:
        self.embeddings.word_embeddings = value

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        task: str | None = None,
        packing: Packing | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """Encode a batch.

        Args:
            input_ids: [B, T]; or `inputs_embeds` [B, T, H] in its place.
            attention_mask: [B, T], 1 for a token and 0 for padding; a mask made ready, [B, 1, T, T], is used as it is.
            token_type_ids: [B, T], the segment of each token; zeros unless given.
            position_ids: [B, T] or [1, T]; 0 to T - 1 unless given.
            task: whose private layers to use, where there are any; without one, those of `config.private_owner`.
            packing: where the real tokens stand; then they alone go through the layers. It says what `attention_mask`
                says, which is not looked at, and zeros come out at padding.

        Raises:
            ValueError: the input is longer than the model has positions, or not exactly one kind of input is given.
        """
        if packing is not None:
            inputs = (input_ids, token_type_ids, position_ids, inputs_embeds)
            return self._encode_packed(packing, *inputs, task=task, **kwargs)
        embedded = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds)
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = tokens_of(attention_mask)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=embedded, attention_mask=attention_mask)
        hidden_states = self.encoder(embedded, mask, task=task, **kwargs)
        return self._pooled(hidden_states)

    def _encode_packed(self, packing: Packing, *inputs: Tensor | None, **kwargs) -> BaseModelOutputWithPooling:
        input_ids, token_type_ids, position_ids, inputs_embeds = inputs
        if position_ids is None:
            rows, width = packing.shape
            device = packing.tokens.device
            position_ids = self.embeddings.positions(input_ids, width, device).expand(rows, width)
        input_ids, token_type_ids, position_ids, inputs_embeds = (
            None if given is None else packing.pack(given)
            for given in (input_ids, token_type_ids, position_ids, inputs_embeds)
        )
        embedded = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds, packed=True)
        return self._pooled(packing.unpack(self.encoder(embedded, packing=packing, **kwargs)))

    def _pooled(self, hidden_states: Tensor) -> BaseModelOutputWithPooling:
        pooled = None if self.pooler is None else self.pooler(hidden_states)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)


class MinBertTransform(nn.Module):
    """The layer between the encoder and the prediction of words."""

    def __init__(self, config: MinBertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.word_size)
        self.activation = make_activation("hidden_act", config.word_head_act or config.hidden_act)
        self.LayerNorm = nn.LayerNorm(config.word_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.LayerNorm(self.activation(self.dense(hidden_states)))


class MinBertWordPredictor(nn.Module):
    """[B, T, H] -> [B, T, V]. The decoder is the word embedding, transposed; its bias is its own."""

    def __init__(self, config: MinBertConfig):
        super().__init__()
        self.transform = MinBertTransform(config)
        self.decoder = nn.Linear(config.word_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))  # BERT files store it here, tied to the decoder's

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.transform(hidden_states))


class MinBertWordHead(nn.Module):
    """It exists for the checkpoint's names."""

    def __init__(self, config: MinBertConfig):
        super().__init__()
        self.predictions = MinBertWordPredictor(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.predictions(hidden_states)


class MinBertForMaskedLM(MinBertPreTrainedModel):
    """The encoder with BERT's masked-word head, for pre-training further.

    With `add_pooling_layer` it has a pooler too. Its answers do not depend on that, but it is saved with the encoder
    for what is trained next.
    """

    _keys_to_ignore_on_load_unexpected = [r"pooler\."]
    _tied_weights_keys = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def __init__(self, config: MinBertConfig, add_pooling_layer: bool = False):
        super().__init__(config)
        self.bert = MinBertModel(config, add_pooling_layer)
        self.cls = MinBertWordHead(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MinBertWordPredictor):
            init.zeros_(module.bias)

    def get_output_embeddings(self) -> nn.Linear:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias  # else a resized vocabulary keeps the old bias

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        packing: dict[str, Any] | None = None,
        predicted: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        """Inputs as for `MinBertModel`; `labels` [B, T] are word ids, -100 where nothing is to be predicted.

        Args:
            packing: what `Packing.describe` says of the batch; then only real tokens go through the encoder.
            predicted: int64 [P], the places in the flattened batch of the words to predict, where only those are. The
                others' logits are most of the work of a small encoder. N * T is a filler, which has no label.
            num_items_in_batch: how many words the loss is a mean over, where the batch is one of several of a step;
                those of `labels` unless given.

        Returns:
            `logits` [B, T, V], or of `predicted` [P, V], and, with labels, `loss`: the mean cross-entropy over the
            predicted words, 0 where there is none.
        """
        packed = Packing.read(packing, attention_mask)
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.bert(*inputs, packing=packed, return_dict=True, **kwargs)
        states, loss = outputs.last_hidden_state, None
        if predicted is not None:
            states = states.flatten(0, 1)
            states = states.index_select(0, predicted.clamp(max=len(states) - 1))
            labels = labels if labels is None else F.pad(labels.flatten(), (0, 1), value=IGNORED)[predicted]
        logits = self.cls(states)
        if labels is not None:
            summed = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")
            count = (labels != IGNORED).sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
            loss = summed / count.clamp(min=1)  # where no word is to be predicted, a mean would be NaN
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def make_encoder(config: MinBertConfig) -> MinBertModel | LibraryEncoder:
    """The encoder of a config, with a pooler."""
    return MinBertModel(config) if config.encoder_config is None else LibraryEncoder(config, MinBertPooler)


class MinBertForMultiTask(MinBertPreTrainedModel):
    """One encoder and one head per task of `config.tasks`.

    Raises:
        ValueError: the config has no tasks, or one whose head cannot be built.
    """

    def __init__(self, config: MinBertConfig):
        super().__init__(config)
        if not config.tasks:
            raise ValueError("`tasks` is empty: MinBertForMultiTask needs at least one. Pass `tasks=[...]`.")
        self.bert = make_encoder(config)
        private = config.copying_tasks if config.private_encoders else ()
        self.private = PerTask({name: start_as(make_encoder(config), self.bert) for name in private})
        self.heads = TaskHeads(config)
        if isinstance(self.bert, LibraryEncoder):
            self.supports_gradient_checkpointing = self.bert.model.supports_gradient_checkpointing
        self.post_init()

    def initialize_weights(self) -> None:
        """As the library's. What is in a model of the library's, that has initialized itself: copies begin anew."""
        super().initialize_weights()
        for _, private in self.private.named_children():
            if isinstance(private, LibraryEncoder):
                for name, parameter in private.named_parameters():
                    init.copy_(parameter, self.bert.get_parameter(name))

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As for every MinBERT; the folder has the pipeline that asks all tasks, too."""
        # Imported here, because it is all that asks for pipelines. The library sees it, and copies that file as well.
        from .pipeline_minbert import CUSTOM_PIPELINES

        others = vars(self.config).get("custom_pipelines", {})
        self.config.custom_pipelines = {**others, **deepcopy(CUSTOM_PIPELINES)}
        super().save_pretrained(save_directory, *args, **kwargs)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As the library's; every private encoder gets as many words. The embeddings of the first encoder."""
        options = (new_num_tokens, pad_to_multiple_of, mean_resizing)
        for encoder in map(self.encoder_of, self.config.task_names):
            if isinstance(encoder, LibraryEncoder):
                encoder.model.resize_token_embeddings(*options)
            elif encoder is not self.bert:
                encoder.resize_token_embeddings(*options)
        resized = super().resize_token_embeddings(*options)
        self.config.check_tasks()  # the encoder's own config has as many words now
        return resized

    def set_active_task(self, name: str | None) -> None:
        """Choose the head that a call without `task` uses, and the labels that the config shows; see `MinBertConfig`.

        Raises:
            ValueError: there is no such task.
        """
        self.config.set_active_task(name)

    def encoder_of(self, task: str) -> MinBertModel | LibraryEncoder:
        """The encoder that a task's sentences go through."""
        private = self.private.get(task)
        return self.bert if private is None else private

    def lacks(self, capability: str) -> bool:
        """Whether `forward` has this parameter and the encoder, which is the library's, can do nothing with it."""
        encoder = self.bert
        return isinstance(encoder, LibraryEncoder) and (
            capability == "packing" or (capability == "inputs_embeds" and capability not in encoder.parts.accepts)
        )

    def positions_of(self, task: str, input_ids: Tensor) -> Tensor | None:
        """The `position_ids` that embeddings of these words need to mean the same as their ids, in the ids' shape.

        `None` where a position does not depend on the words.
        """
        return self.encoder_of(task).positions_of(input_ids)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        task: str | None = None,
        packing: dict[str, Any] | None = None,
        pooled: Tensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        """Inputs as for `MinBertModel`, and the task whose head answers.

        A task with `pair_encoding: bi` takes [B, 2, T] where others take [B, T]: both sentences of an example, which
        go through the encoder as one batch of 2 * B. Token ids of joined pairs, [B, T], as every tokenizer and stock
        pipeline gives them, are taken apart first: by segment ids, or at the separator (`config.sep_token_id`).

        Args:
            labels: [B]; class ids, or scores; of kind `labels` [B, C], a 0 or 1 for each; of tags [B, T], -100 at
                tokens without one.
            task: its name. Without one the active task answers, in the form that stock tools expect: see
                `stock_logits`; divided by the task's temperature, so that their softmax gives its probabilities.
            packing: what `Packing.describe` says of the batch; then only real tokens go through the encoder.
            pooled: [B, S, D], what `pooled_of` gave for the batch, instead of all other inputs.

        Returns:
            `logits` [B, C], of tags [B, T, C], and, with labels, `loss`, that of the head's own logits in both forms.
            Hidden states and attentions are those of the encoder's batch.

        Raises:
            ValueError: there is no such task, neither a task nor an active task, or inputs of another shape.
        """
        name = self.config.active_task if task is None else task
        if name is None:
            raise ValueError(
                f"Which task? Pass `task=` with one of: {', '.join(self.config.task_names)}; "
                "or choose one for all calls with `model.set_active_task(...)`."
            )
        spec, head = self.config.get_task(name), self.heads.get(name)
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids,
            "position_ids": position_ids, "inputs_embeds": inputs_embeds,
        }  # fmt: skip
        outputs = BaseModelOutputWithPooling()
        if pooled is None:
            if packing is None:
                inputs = taken_apart(inputs, spec, self.config.sep_token_id)
            encoded, outputs = self._encode([name], inputs, packing, **kwargs)
            vectors = head.vectors(encoded)
        else:
            vectors = head.sentence_dropout(pooled)
        logits = head(vectors)
        loss = None if labels is None else head.loss(vectors, logits, labels, spec)
        if task is None:
            logits = stock_logits(spec["kind"], logits)
            logits = logits if spec["temperature"] == 1 else logits / spec["temperature"]
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def pooled_of(
        self,
        tasks: Sequence[str],
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        packing: dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """What several tasks' heads pool of the same inputs, from one pass through the encoder.

        Args:
            tasks: their names; all with the same `encoder_path`, and `bi` in all of them or in none. The rest as in
                `forward`.

        Returns:
            of each task [B, S, D], all that its head needs of the encoder: `pooled` of `forward`.
        """
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids,
            "position_ids": position_ids, "inputs_embeds": inputs_embeds,
        }  # fmt: skip
        encoded, _ = self._encode(tasks, inputs, packing, output_hidden_states=False)
        return {name: self.heads.get(name).pooled(encoded) for name in tasks}

    def encoder_path(self, task: str) -> list[nn.Module]:
        """The encoder and the layers that a task's sentences go through: tasks with the same ones can share a pass."""
        encoder = self.encoder_of(task)
        return [encoder, *encoder.layers_of(task)]

    def logits_of(
        self,
        tasks: Sequence[str],
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        packing: dict[str, Any] | None = None,
    ) -> dict[str, Tensor]:
        """The answers of several tasks to the same inputs, from one pass through the encoder.

        Args:
            tasks: their names; all with the same `pair_encoding` and `encoder_path`. The rest as in `forward`.

        Returns:
            each task's logits [B, C], as `forward` gives them where the task is named.
        """
        pooled = self.pooled_of(tasks, input_ids, attention_mask, token_type_ids, packing)
        heads = {name: self.heads.get(name) for name in tasks}
        return {name: head(head.sentence_dropout(pooled[name])) for name, head in heads.items()}

    def _encode(
        self,
        tasks: Sequence[str],
        inputs: dict[str, Tensor | None],
        packing: dict[str, Any] | None,
        **kwargs,
    ) -> tuple[Encoded, BaseModelOutputWithPooling]:
        """What these tasks' heads read, and the encoder's outputs, with the hidden states that the caller asks for."""
        inputs = sentences(inputs, self.config.get_task(tasks[0]))
        # Of its own, not what the library records: that is those layers which the caller wants to see.
        mixed = [] if any(self.heads.get(name).layer_mix is not None for name in tasks) else None
        encoder = self.encoder_of(tasks[0])
        # It says what the mask says, and is left out where only our layers could compute by it.
        packed = None if isinstance(encoder, LibraryEncoder) else Packing.read(packing, inputs["attention_mask"])
        outputs = encoder(**inputs, task=tasks[0], packing=packed, states=mixed, return_dict=True, **kwargs)
        last, mask = outputs.last_hidden_state, inputs["attention_mask"]
        if packed is not None:
            # The library gives the last one as it came out, padded; the others as they were recorded, or `None`.
            if outputs.hidden_states is not None:
                outputs.hidden_states = tuple(
                    state if state is None or state.shape[:2] == packed.shape else packed.unpack(state)
                    for state in outputs.hidden_states
                )
            if mixed is not None:
                mixed = [*map(packed.unpack, mixed[:-1]), last]
        made_ready = mask is None or mask.dim() != 2  # then which tokens are padding is not to be seen
        mask = last.new_ones(last.shape[:2], dtype=torch.bool) if made_ready else tokens_of(mask)
        return Encoded((last,) if mixed is None else tuple(mixed), mask, outputs.pooler_output), outputs


AUTO_MAP = {
    "AutoConfig": "configuration_minbert.MinBertConfig",
    "AutoModel": "modeling_minbert.MinBertModel",
    "AutoModelForMaskedLM": "modeling_minbert.MinBertForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_minbert.MinBertForMultiTask",
    "AutoModelForTokenClassification": "modeling_minbert.MinBertForMultiTask",
}
# A registered class makes the library copy this file and its neighbours into every saved folder.
MinBertModel.register_for_auto_class("AutoModel")
MinBertForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
MinBertForMultiTask.register_for_auto_class("AutoModelForSequenceClassification")
