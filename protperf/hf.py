"""protperf's models in transformers: `import protperf.hf`, then `AutoModel.from_pretrained(FOLDER)` opens a model's folder.

Nothing of the folder is run as code: the classes are those of this file, the weights are safetensors. Works with
transformers 4.44 and later (the extra `hf`).

Axis letters: `B` batch, `L` length in tokens, `D` model width, `V` vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoTokenizer,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizer,
    )
    from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput, MaskedLMOutput
except ImportError as error:
    raise ImportError("protperf.hf needs transformers: pip install 'protperf[hf]'") from error

from protperf.checkpoint.files import BEFORE, describe
from protperf.checkpoint.folder import MODEL_TYPE, check_config, folder_config
from protperf.checkpoint.loading import build_model, check_shared
from protperf.config import ModelConfig, ObjectiveConfig
from protperf.formats.json_files import read_json
from protperf.vocab import PADDING_DOCUMENT, VOCABULARY, check_fingerprint

NOT_ASKED = -100
"""The label of a token that is not asked, as everywhere in transformers."""


class ProtperfConfig(PretrainedConfig):
    """What `config.json` of a model's folder says; without arguments a new model of the default shape.

    Args:
        model: fields of `protperf.config.ModelConfig`.
        objective: fields of `protperf.config.ObjectiveConfig`.
        attend_across_documents: whether packed proteins saw each other in training.
        dataset_digest: hash of the dataset it was trained on.
        step: optimizer steps it was trained for.
        kwargs: other entries of the file, and those of transformers.
    """

    model_type = MODEL_TYPE

    def __init__(
        self,
        *,
        model: dict[str, Any] | None = None,
        objective: dict[str, Any] | None = None,
        attend_across_documents: bool = False,
        dataset_digest: str = "",
        step: int = 0,
        **kwargs: Any,
    ) -> None:
        description = describe(
            ModelConfig(),
            ObjectiveConfig(),
            attend_across_documents=attend_across_documents,
            dataset_digest=dataset_digest,
        )
        description["model"] |= BEFORE | model if model else {}
        description["objective"] |= objective or {}
        own = folder_config(description, step=step)
        own["pad_token_id"], own["bos_token_id"] = VOCABULARY.pad, VOCABULARY.bos
        own["eos_token_id"], own["mask_token_id"] = VOCABULARY.eos, VOCABULARY.mask
        own["tie_word_embeddings"] = False  # the head is the embedding itself, not a second matrix
        own.pop("model_type")
        super().__init__(**{**own, **kwargs})

    @staticmethod
    def own_entries() -> list[str]:
        """Return the names of what `protperf.load` needs of `config.json`."""
        description = describe(
            ModelConfig(), ObjectiveConfig(), attend_across_documents=False, dataset_digest=""
        )
        return list(folder_config(description, step=0))

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is written to `config.json`: all that is ours, even what equals a default of today, and no local path."""
        content = {**super().to_diff_dict(), **{name: getattr(self, name) for name in self.own_entries()}}
        content.pop("_name_or_path", None)
        return content

    @property
    def hidden_size(self) -> int:
        """Width D."""
        return int(self.model["model_dim"])

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        return int(self.model["num_layers"])

    @property
    def num_attention_heads(self) -> int:
        """Number of heads of each attention."""
        return int(self.model["num_heads"])

    @property
    def vocab_size(self) -> int:
        """Number of tokens V."""
        return len(self.vocabulary)


class ProtperfPreTrainedModel(PreTrainedModel):
    """What the classes below share: a `ProteinModel`, built from a config, whose weights have the same names in all.

    Args:
        config: of the folder, or a new one.

    Raises:
        ValueError: a model of another vocabulary, of a later version, or trained for something else than the class asks.
    """

    config_class = ProtperfConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]  # noqa: RUF012 - transformers' name and type
    _supports_param_buffer_assignment = (
        False  # else 4.44 takes the type of the first entry, `redraws`, for all
    )
    _objective: str | None = None

    def __init__(self, config: ProtperfConfig) -> None:
        super().__init__(config)
        place = config.name_or_path or type(config).__name__
        check_config(config.to_dict(), place=place)
        self.model, objective = build_model(config.to_dict(), place=place)
        if self._objective not in (None, objective.kind):
            right = "AutoModelForCausalLM" if objective.kind == "causal" else "AutoModelForMaskedLM"
            raise ValueError(f"{place}: its objective is {objective.kind}; load it with {right}")
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a folder, all of it.

        Args:
            pretrained_model_name_or_path: the folder.
            args: see `transformers.PreTrainedModel.from_pretrained`.
            kwargs: likewise.

        Raises:
            ValueError: weights are missing, unknown, damaged, not finite or of another shape: none is made up.
        """
        place = pretrained_model_name_or_path
        folder = Path(place or "", kwargs.get("subfolder") or "")
        if place and folder.is_dir():
            check_shared(folder)
        kwargs["use_safetensors"] = True  # no pickle, whatever else lies in the folder
        wants_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(place, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        for key, words in (
            ("missing_keys", "is not in the file"),
            ("unexpected_keys", "is not in the model"),
            ("mismatched_keys", "has another shape in the file"),
        ):
            for name in sorted(info[key], key=str):
                raise ValueError(f"{place}: {name} {words}; was it saved by another model?")
        return (model, info) if wants_info else model

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, whose matrix is the head too."""
        return self.model.embedding

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: `ProteinModel` draws its own."""

    def _states(
        self, input_ids: Tensor, attention_mask: Tensor | None, every: bool | None
    ) -> tuple[Tensor, ...]:
        """Return the hidden states of all layers, or (unless `every`) of the last alone, `(B, L, D)` each."""
        every = self.config.output_hidden_states if every is None else every
        last = self.config.num_hidden_layers
        documents = documents_of_mask(input_ids, attention_mask)
        return tuple(self.model.states(input_ids, documents, layers=range(last + 1) if every else (last,)))

    def _returned(self, output: Any, return_dict: bool | None) -> Any:
        keep = self.config.return_dict if return_dict is None else return_dict
        return output if keep else output.to_tuple()


class ProtperfModel(ProtperfPreTrainedModel):
    """Hidden states: what `AutoModel` gives for a folder of either objective."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Return `BaseModelOutput`: `last_hidden_state` after the final norm, `(B, L, D)`, and all layers if asked.

        Args:
            input_ids: one protein a row, as the tokenizer gives it, `(B, L)`.
            attention_mask: 1 where a token is, 0 where padding is, `(B, L)`; without it, `<pad>` is padding.
            output_hidden_states: also give what enters the first block and what leaves each.
            return_dict: false: a tuple.
        """
        states = self._states(input_ids, attention_mask, output_hidden_states)
        output = BaseModelOutput(states[-1], states if len(states) > 1 else None)
        return self._returned(output, return_dict)


class ProtperfForMaskedLM(ProtperfPreTrainedModel):
    """Scores of all tokens at each place, for models that were trained on masked residues."""

    _objective = "masked"

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Return `MaskedLMOutput`: `logits` `(B, L, V)`, and `loss` if there are labels.

        Args:
            input_ids: as for `ProtperfModel`.
            attention_mask: as for `ProtperfModel`.
            labels: the right token of each place, -100 where none is asked, `(B, L)`.
            output_hidden_states: as for `ProtperfModel`.
            return_dict: as for `ProtperfModel`.
        """
        states = self._states(input_ids, attention_mask, output_hidden_states)
        logits = self.model.logits(states[-1])
        loss = None if labels is None else mean_loss(logits, labels)
        output = MaskedLMOutput(loss, logits, states if len(states) > 1 else None)
        return self._returned(output, return_dict)


class ProtperfForCausalLM(ProtperfPreTrainedModel):
    """Scores of the next token, for models that were trained on it; `protperf generate` samples from them."""

    _objective = "causal"

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: transformers knows no state of linear attention."""
        raise ValueError("transformers cannot sample from this model; `protperf generate FOLDER` does")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Return `CausalLMOutput`: `logits` `(B, L, V)`, at each place those of the next token, and `loss` if there are labels.

        Args:
            input_ids: as for `ProtperfModel`.
            attention_mask: as for `ProtperfModel`.
            labels: as `input_ids`, -100 where none is asked; they are moved on by one place here.
            output_hidden_states: as for `ProtperfModel`.
            return_dict: as for `ProtperfModel`.
        """
        states = self._states(input_ids, attention_mask, output_hidden_states)
        logits = self.model.logits(states[-1])
        loss = None if labels is None else mean_loss(logits[:, :-1], labels[:, 1:])
        output = CausalLMOutput(loss, logits, hidden_states=states if len(states) > 1 else None)
        return self._returned(output, return_dict)


class ProtperfTokenizer(PreTrainedTokenizer):
    """Letters to tokens, as `<bos> residues <eos>`; lower case as upper case, white space is passed over.

    Args:
        vocab_file: `config.json` of a model's folder, whose vocabulary is compared with that of this protperf.
        kwargs: of transformers.

    Raises:
        ValueError: a model of another vocabulary; when called, a character that is no residue letter.
    """

    vocab_files_names = {"vocab_file": "config.json"}  # noqa: RUF012 - transformers' name and type
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str | None = None, **kwargs: Any) -> None:
        if vocab_file is not None:
            about = read_json(Path(vocab_file), remedy="give another folder")
            found = about.get("fingerprint") if isinstance(about, dict) else None
            check_fingerprint(str(found), vocab_file)
        special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "mask", "unk")}
        super().__init__(**{**special, "clean_up_tokenization_spaces": False, **kwargs})

    @property
    def vocab_size(self) -> int:
        """Number of tokens V."""
        return len(VOCABULARY)

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        return {token: number for number, token in enumerate(VOCABULARY.tokens)}

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Return `<bos> residues <eos>`; a second protein is not shown beside the first."""
        if token_ids_1 is not None:
            raise ValueError(
                "a protperf tokenizer takes one protein a row; give two as two rows: [first, second]"
            )
        return [VOCABULARY.bos, *token_ids_0, VOCABULARY.eos]

    def get_special_tokens_mask(
        self,
        token_ids_0: list[int],
        token_ids_1: list[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        """Return 1 for tokens that are no residues, else 0: what a data collator must not mask."""
        tokens = (
            token_ids_0
            if already_has_special_tokens
            else self.build_inputs_with_special_tokens(token_ids_0, token_ids_1)
        )
        return [int(token >= VOCABULARY.num_residues) for token in tokens]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write nothing: the vocabulary is in the model's `config.json`."""
        return ()

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the tokens as text, without spaces."""
        return "".join(tokens)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [VOCABULARY.tokens[token] for token in VOCABULARY.encode("".join(text.split()))]

    def _convert_token_to_id(self, token: str) -> int:
        return VOCABULARY.id_of(token)

    def _convert_id_to_token(self, index: int) -> str:
        return VOCABULARY.tokens[index]


def documents_of_mask(tokens: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Number documents for `ProteinModel`: each row is one protein, int32 `(B, L)`; `None` where nothing is padding.

    Args:
        tokens: ids, `(B, L)`.
        attention_mask: 1 (true) where a token is, `(B, L)`; it alone decides, so that a `<pad>` which a collator put in a
            residue's place is a token like others. Without it, `<pad>` is padding.

    Raises:
        ValueError: padding inside of a protein, or a mask of another shape.
    """
    if attention_mask is None:
        real, hides = tokens != VOCABULARY.pad, "<pad> in input_ids stands"
    else:
        if attention_mask.shape != tokens.shape:
            raise ValueError(
                f"attention_mask is {tuple(attention_mask.shape)}, input_ids are {tuple(tokens.shape)}; give one value a token"
            )
        real, hides = attention_mask.bool(), "attention_mask hides tokens"
    if real.all():
        return None
    begins = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]
    if (begins > 1).any():
        row = int((begins > 1).nonzero()[0])
        raise ValueError(f"{hides} inside of row {row}; padding may stand before and behind a protein alone")
    return torch.where(real, 0, PADDING_DOCUMENT).int()


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the labels in nats, in float32.

    Args:
        logits: `(B, L, V)`.
        labels: `(B, L)`, -100 where none is asked.
    """
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=NOT_ASKED)


AutoConfig.register(MODEL_TYPE, ProtperfConfig, exist_ok=True)
AutoModel.register(ProtperfConfig, ProtperfModel, exist_ok=True)
AutoModelForMaskedLM.register(ProtperfConfig, ProtperfForMaskedLM, exist_ok=True)
AutoModelForCausalLM.register(ProtperfConfig, ProtperfForCausalLM, exist_ok=True)
AutoTokenizer.register(ProtperfConfig, slow_tokenizer_class=ProtperfTokenizer, exist_ok=True)
