"""The configuration: YAML keys are fields, every shipped experiment works, wrong values are named."""

from __future__ import annotations

import ast
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from protperf import config as config_module
from protperf.attention import ATTENTIONS, COUPLINGS, NORMS
from protperf.config import (
    DataConfig,
    LoggerConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    TrainerConfig,
    from_section,
    to_dict,
)
from protperf.model import ProteinModel
from protperf.optim import learning_rate_factor
from protperf.train.settings import SECTIONS, Settings, read_settings
from protperf.train.trainers import resolve

CONF = Path(__file__).resolve().parents[1] / "conf"
GROUP_FILES = [path for path in sorted(CONF.glob("*/*.yaml")) if path.parent.name != "experiment"]
EXPERIMENTS = sorted(path.stem for path in CONF.glob("experiment/*.yaml"))


def composed(*overrides: str) -> Any:
    with initialize_config_module("protperf.conf", version_base="1.3"):
        return compose("train", ["data.path=nowhere", *overrides])


def settings_of(*overrides: str) -> Settings:
    return read_settings(composed(*overrides))


@pytest.mark.parametrize("path", GROUP_FILES, ids=[f"{path.parent.name}/{path.stem}" for path in GROUP_FILES])
def test_the_keys_of_each_group_file_are_the_fields_of_its_dataclass(path: Path):
    group = path.parent.name
    names = [field.name for field in fields(SECTIONS[group])]
    assert list(composed(f"{group}={path.stem}")[group]) == names
    own = set(OmegaConf.to_container(OmegaConf.load(path))) - {"defaults"}  # type: ignore[arg-type]
    assert own <= set(names)


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("model", "tiny"),
        ("objective", "masked"),
        ("data", "default"),
        ("optim", "default"),
        ("trainer", "default"),
        ("logger", "none"),
    ],
)
def test_defaults_are_the_same_in_yaml_and_in_python(group: str, name: str):
    written = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))
    own = {field.name: field.default for field in fields(SECTIONS[group])}
    computed = {"path", "decay_steps"}
    assert {key: value for key, value in written.items() if key not in computed} == {  # type: ignore[union-attr]
        key: list(value) if isinstance(value, tuple) else value
        for key, value in own.items()
        if key not in computed
    }


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.valid_sets=[valid,train]", r"valid_sets is .*allowed: valid, test, ood"),
        ("trainer.max_steps=abc", r"TrainerConfig: max_steps: "),
        ("optim.learning_rate=inf", r"learning_rate is inf"),
        ("run_dir=''", r"run_dir is empty"),
        ("name=a/../../b", r"name is 'a/../../b'"),
    ],
)
def test_a_mistake_is_said_with_its_key(override: str, said: str):
    with pytest.raises(ValueError, match=said) as error:
        settings_of(override)
    assert "\n" not in str(error.value)


def test_nodes_that_nobody_started_are_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match=r"trainer.num_nodes=2: nobody started .* torchrun or srun"):
        resolve(settings_of("trainer.num_nodes=2").trainer)


def test_every_key_is_described_under_its_field():
    files = sorted(Path(config_module.__file__).parent.glob("*.py"))
    nodes = [node for path in files for node in ast.parse(path.read_text()).body]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    assert len(classes) == len(SECTIONS)
    for node in classes:
        for statement, after in pairwise(node.body):
            if isinstance(statement, ast.AnnAssign):
                described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert described, f"{node.name}.{ast.unparse(statement.target)}"


def test_every_group_has_a_dataclass_and_every_dataclass_a_group():
    folders = {path.name for path in CONF.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*SECTIONS, "experiment"}
    classes = {value for name, value in vars(config_module).items() if name.endswith("Config")}
    assert set(SECTIONS.values()) == classes


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_shipped_experiment_becomes_settings(name: str):
    settings = settings_of(f"experiment={name}")
    assert settings.name == name
    assert settings.run_dir == Path("runs") / name
    assert settings.optim.decay_steps == settings.trainer.max_steps


def test_the_demo_both_trembl_experiments_and_those_of_the_paper_are_there():
    transformers = [f"paper_concat_transformer_{layers}l" for layers in (1, 2, 3)]
    ours = ["trembl_causal_36l", "trembl_masked_36l"]
    assert set(EXPERIMENTS) == {"demo", "paper_concat", *transformers, "paper_single", *ours}
    assert settings_of("experiment=trembl_causal_36l").objective.kind == "causal"
    assert settings_of("experiment=trembl_masked_36l").objective.kind == "masked"


@pytest.mark.parametrize(
    ("preset", "layers", "softmax"),
    [("performer_36l", 36, False), ("performer_12l", 12, False), ("transformer_36l", 36, True)],
)
def test_presets_have_the_shapes_of_the_paper(preset: str, layers: int, softmax: bool):
    model = settings_of(f"model={preset}").model
    assert (model.num_layers, model.num_heads) == (layers, 8)
    assert (model.model_dim, model.feedforward_dim, model.num_features) == (512, 1024, 256)
    assert (model.attention == "softmax") == softmax


def num_parameters(model: ModelConfig) -> int:
    """Count by hand: embedding (which is the head), and of each block attention, feed-forward and two norms; a last norm."""
    assert (model.feedforward, model.qk_norm) == ("gelu", False)
    width = model.model_dim
    attention = 4 * width * width  # queries, keys, values, output
    feedforward = 2 * width * model.feedforward_dim
    norm = width + width  # weight and bias
    return 36 * width + model.num_layers * (attention + feedforward + 2 * norm) + norm


PARAMETERS = {
    "tiny": 531_200,
    "performer_12l": 25_209_856,
    "performer_36l": 75_590_656,
    "transformer_36l": 75_590_656,
    "paper_single": 75_590_656,
    "paper_concat": 18_906_112,
    "paper_transformer_1l": 403_968,
    "paper_transformer_2l": 798_208,
    "paper_transformer_3l": 1_192_448,
}
"""Model preset -> its parameters, as docs/training.md says."""


@pytest.mark.parametrize("path", sorted(CONF.glob("model/*.yaml")), ids=lambda path: path.stem)
def test_each_model_preset_has_the_parameters_that_its_shape_says(path: Path):
    config = settings_of(f"model={path.stem}").model
    with torch.device("meta"):
        model = ProteinModel(config, causal=False)
    assert num_parameters(config) == PARAMETERS[path.stem]
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[path.stem]
    if config.attention != "softmax":
        shape = (config.num_features, config.model_dim // config.num_heads)
        assert {tuple(block.attention.projection.shape) for block in model.blocks} == {shape}


PAPER_SHAPES = {
    "paper_single": ("relu", (8, 36, 1024, 512), 1024),
    "paper_concat": ("relu", (8, 6, 2048, 512), 8192),
    "paper_concat_transformer_1l": ("softmax", (8, 1, 256, 256), 8192),
    "paper_concat_transformer_2l": ("softmax", (8, 2, 256, 256), 8192),
    "paper_concat_transformer_3l": ("softmax", (8, 3, 256, 256), 8192),
}
"""Experiment -> attention, (heads, layers, feed-forward, width) and tokens, as Choromanski et al. 2021 have them."""


@pytest.mark.parametrize("name", PAPER_SHAPES)
def test_the_experiments_of_the_paper_have_its_shapes_and_numbers(name: str):
    settings = settings_of(f"experiment={name}")
    model, optim = settings.model, settings.optim
    attention, shape, length = PAPER_SHAPES[name]
    assert model.attention == attention
    assert (model.num_heads, model.num_layers, model.feedforward_dim, model.model_dim) == shape
    assert model.num_features == 256
    assert model.dropout == 0.1
    assert settings.data.context_length == length
    assert settings.objective == ObjectiveConfig(kind="masked")
    assert {learning_rate_factor(step, optim) for step in (0, 1, 10**6)} == {1.0}
    assert optim.learning_rate == 1e-3
    assert (optim.beta1, optim.beta2, optim.eps, optim.weight_decay) == (0.9, 0.98, 1e-9, 0.1)
    assert (optim.kind, optim.decayed) == ("adamw", "all")
    assert settings.trainer.gradient_clip == 0.5
    if length == 8192:
        assert settings.data.batch_size == 8 * 8  # 8 windows on each of 8 GPUs
        assert settings.data.attend_across_documents


def test_the_objectives_are_berts_split_the_released_one_and_the_next_token():
    shares = {
        name: (o.kind, o.mask_fraction, o.shown_as_mask, o.shown_as_random)
        for name in ("masked", "masked_released", "causal")
        for o in [settings_of(f"objective={name}").objective]
    }
    assert shares["masked"] == ("masked", 0.15, 0.8, 0.1)
    assert shares["masked_released"] == ("masked", 0.15, 0.1, 0.8)
    assert shares["causal"][0] == "causal"


def test_the_schedules_of_optim_are_presets():
    schedules = {path.stem: settings_of(f"optim={path.stem}").optim for path in CONF.glob("optim/*.yaml")}
    assert {name: config.schedule for name, config in schedules.items()} == {
        "default": "cosine",
        "constant": "constant",
        "inverse_sqrt": "inverse_sqrt",
        "warmup_stable_decay": "warmup_stable_decay",
        "paper": "constant",
    }


def test_an_override_reaches_its_field_and_keeps_its_type():
    settings = settings_of(
        "trainer.max_steps=7", "optim.learning_rate=2e-4", "data.valid_sets=[valid,ood]", "logger.entity=lab"
    )
    assert settings.trainer.max_steps == settings.optim.decay_steps == 7
    assert settings.optim.learning_rate == 2e-4
    assert tuple(settings.data.valid_sets) == ("valid", "ood")
    assert settings.logger.entity == "lab"


def test_the_choices_of_attention_and_projection_are_those_that_there_are():
    with pytest.raises(ValueError, match="allowed: " + ", ".join(ATTENTIONS)):
        ModelConfig(attention="none")
    with pytest.raises(ValueError, match="allowed: " + ", ".join(COUPLINGS)):
        ModelConfig(projection="none")
    with pytest.raises(ValueError, match="allowed: " + ", ".join(NORMS)):
        ModelConfig(projection_norms="none")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"attention": "trig"}, "ModelConfig.attention is 'trig'.*set qk_norm to true"),
        ({"attention": "rfa", "num_features": 64}, "num_features is 64; allowed .* at least 128"),
        ({"attention": "rfa", "num_features": 128, "qk_norm": True}, "set qk_norm to false"),
        ({"attention": "reformer", "lsh_buckets": 5}, "lsh_buckets is 5; allowed: even numbers, or 1"),
        ({"max_positions": 5}, "max_positions is 5, but positions 'rope' have no table; set it to 0"),
        (
            {"positions": "none", "rope_frequencies": "half"},
            "positions 'none' rotate nothing; set it to exact",
        ),
        ({"attention": "reformer", "features": "learned"}, "attention 'reformer' has none that could learn"),
        ({"attention": "oprf", "projection_norms": "regularised"}, "allowed: chi"),
    ],
)
def test_a_part_outside_of_its_domain_is_refused_in_one_line(choice: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as error:
        ModelConfig(**choice)
    assert "\n" not in str(error.value)


SIZES = (
    *("num_heads", "model_dim", "feedforward_dim", "num_features", "max_positions"),
    *("linformer_rank", "linformer_length", "lsh_buckets", "lsh_window"),
)

WRONG = [
    (
        ModelConfig,
        "attention",
        "favour",
        "favor, favor_hyperbolic, oprf, relu, relu_unprojected, elu, trig, rfa, softmax, linformer, reformer",
    ),
    (ModelConfig, "projection", "gaussian", "iid, orthogonal, simplex"),
    (ModelConfig, "positions", "rotary", "rope, absolute, learned, none"),
    (ModelConfig, "feedforward", "relu", "gelu, swiglu"),
    (ModelConfig, "norm", "sandwich", "pre, post"),
    (ModelConfig, "head", "big", "matrix, dense"),
    (ModelConfig, "features", "own", "drawn, learned"),
    (ModelConfig, "softmax_layers", (1, 4), "names layer 4; allowed: 0 to 3"),
    (ModelConfig, "norm_eps", -1.0, "0.0 to 1.0"),
    (ModelConfig, "num_layers", 0, "1 to 4096"),
    (ModelConfig, "num_layers", 4097, "1 to 4096"),
    (ModelConfig, "num_features", 0, "1 to 1000000000000"),
    *((ModelConfig, field, 4 * 10**12, " to 1000000000000") for field in SIZES),
    (ModelConfig, "dropout", 1.5, "0.0 to 0.99"),
    (ModelConfig, "dropout", float("nan"), "0.0 to 0.99"),
    (ModelConfig, "model_dim", 130, "multiple of num_heads 4"),
    (ModelConfig, "model_dim", 132, "needs an even width"),
    (ObjectiveConfig, "kind", "span", "masked, causal"),
    (ObjectiveConfig, "mask_fraction", 1.1, "0.0 to 1.0"),
    (ObjectiveConfig, "mask_fraction", 0.0, "above 0 to 1"),
    (ObjectiveConfig, "shown_as_random", 0.3, "above 1"),
    (ObjectiveConfig, "label_smoothing", 1.0, "0.0 to 0.99"),
    (DataConfig, "batch_size", 0, "at least 1"),
    (DataConfig, "num_workers", -1, "at least 0"),
    (DataConfig, "valid_sets", [], "at least one"),
    (DataConfig, "valid_sets", ["valid", "valid"], "each named once"),
    (OptimConfig, "kind", "sgd", "adamw, adam"),
    (OptimConfig, "decayed", "none", "matrices, all"),
    (OptimConfig, "schedule", "linear", "constant, cosine, inverse_sqrt, warmup_stable_decay"),
    (OptimConfig, "warmup_steps", -1, "at least 0"),
    (OptimConfig, "cooldown_steps", -1, "at least 0"),
    (OptimConfig, "cooldown_steps", 1, "set schedule to warmup_stable_decay"),
    (OptimConfig, "learning_rate", -1.0, "at least 0.0"),
    (OptimConfig, "decay_steps", 0, "at least 1"),
    (OptimConfig, "final_fraction", 2.0, "0.0 to 1.0"),
    (OptimConfig, "beta1", 1.0, "below 1"),
    (OptimConfig, "beta2", -0.1, "at least 0"),
    (OptimConfig, "eps", -1.0, "at least 0"),
    (TrainerConfig, "accelerator", "tpu", "auto, cpu, gpu"),
    (TrainerConfig, "strategy", "fsdp2", "auto, ddp, fsdp"),
    (TrainerConfig, "precision", "fp16", "32-true, bf16-mixed, 16-mixed"),
    (TrainerConfig, "max_steps", 0, "1 to 1000000000000"),
    (TrainerConfig, "windows_at_once", -1, "at least 0"),
    (TrainerConfig, "keep_checkpoints", 0, "at least 1"),
    (TrainerConfig, "gradient_clip", -1.0, "at least 0"),
    (TrainerConfig, "seed", -1, "0 to 4294967295"),
    (LoggerConfig, "kind", "csv", "none, wandb"),
]


@pytest.mark.parametrize(
    ("section", "field", "value", "allowed"), WRONG, ids=[f"{c.__name__}.{f}-{v}" for c, f, v, _ in WRONG]
)
def test_a_value_that_is_not_allowed_is_named_with_what_is(
    section: type, field: str, value: Any, allowed: str
):
    needed = {"path": "x"} if section is DataConfig else {}
    with pytest.raises(ValueError, match=field.split("_")[0]) as error:
        from_section(section, {**needed, field: value})
    assert allowed in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_a_key_that_no_field_has_is_refused_with_the_keys_there_are(section: type):
    with pytest.raises(ValueError, match="mistyped") as error:
        from_section(section, {"mistyped": 1})
    assert all(field.name in str(error.value) for field in fields(section))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["many", "1.5", [1]])
def test_a_value_of_the_wrong_type_is_refused(value: Any):
    with pytest.raises(ValueError, match="TrainerConfig") as error:
        from_section(TrainerConfig, {"max_steps": value})
    assert "max_steps" in str(error.value)


def test_a_missing_path_is_asked_for():
    with initialize_config_module("protperf.conf", version_base="1.3"):
        config = compose("train")
    with pytest.raises(ValueError, match=r"^data.path is not set; give data.path=VALUE$"):
        read_settings(config)


def test_configurations_are_immutable_and_become_plain_dicts():
    config = ModelConfig()
    with pytest.raises(AttributeError):
        config.num_layers = 3  # type: ignore[misc]
    plain = to_dict(config)
    assert type(plain) is dict
    assert ModelConfig(**plain) == config
