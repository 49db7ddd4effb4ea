"""Test options in config files and environment variables, and plans of the project's configs."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from speedkit_jupyter import ConfigError, Facts, SpeedConfig, machines, plan
from speedkit_jupyter.catalog import CATALOG, named
from speedkit_jupyter.catalog.base.decision import Effect
from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.plans.config import ALONE

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "speed.yaml"


def problems(path: Path, text: str) -> tuple[str, ...]:
    """Return the problems of a file with this text, without the path of its folder."""
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        SpeedConfig.from_yaml(path)
    return tuple(one.replace(f"{path.parent}/", "") for one in caught.value.problems)


WRONG_VALUES = {
    "precision: [1]": "precision: [1]", "precision: no": "precision: False",
    "threads: true": "threads: True", "threads: 0": "threads: 0",
    "compile:": "compile.enabled: None", "compile: [true]": "compile.enabled: [True]",
    "compile: {mode: {a: 1}}": "compile.mode: {'a': 1}",
    "compile: {fullgraph: 1}": "compile.fullgraph: 1", "sdpa: {backend: 3}": "sdpa.backend: 3",
    "device: cuda:-1": "device: 'cuda:-1'",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, f"speed.yaml: {key} is not allowed; allowed: ")
          for text, key in WRONG_VALUES.items()),
        ("# mine\nprecison: bf16\n", "precison: unknown key; allowed: device, threads"),
        ("precison: bf16", "Did you mean 'precision'?"),
        ("compile:\n  mode: default\n  enabel: true\n",
         "compile.enabel: unknown key; allowed: enabled, scope, mode, fullgraph, dynamic, backend, "
         "draws, required, background. Did you mean 'enabled'?"),
        ("precision: bf61", "precision: 'bf61' is not allowed; allowed: auto, fp32, bf16, fp16. "
         "Did you mean 'bf16'?"),
        ("tf32: high\ntf32_matmul_precision: high\n",
         "tf32_matmul_precision: the same as 'tf32', which is there too"),
        ("a: [", "YAML syntax: "),
        ("a: b: c", "YAML syntax: "),
        ("a: 1\n\tb: 2", "YAML syntax: "),
        ("- 1\n- 2", "a config is a mapping, as in 'precision: auto'"),
        ("3", "a config is a mapping, as in 'precision: auto'"),
        ("precision: bf16\nalone: maybe", "alone: 'maybe' is not allowed; allowed: true"),
        ("alnoe: true", "Did you mean 'alone'?"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_file_and_what_is_right(path: Path, text: str, message: str) -> None:
    (problem,) = problems(path, text)
    assert problem.startswith("speed.yaml")
    assert message in problem


def test_missing_file_names_the_nearest_one_beside_it() -> None:
    with pytest.raises(ConfigError, match=r"there is no such file. Did you mean 'auto.yaml'\?"):
        SpeedConfig.from_yaml(CONFIGS / "atuo.yaml")


def test_a_file_that_is_not_utf8_is_refused_by_name(path: Path) -> None:
    path.write_bytes(b"precision: \xff")
    with pytest.raises(ConfigError, match=r"speed\.yaml: can't be read: 'utf-8' codec"):
        SpeedConfig.from_yaml(path)


BLOCKS = {"enabled": True, "scope": "blocks"}


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("tf32_matmul_precision: high", {"tf32": "high"}),
        ("optimizer: {fused: true}", {"fused_optimizer": {"enabled": True}}),
        ("compile: false", {"compile": {"enabled": False}}),
        ("compile: on", {"compile": {"enabled": True}}),
        ("sdpa: math", {"sdpa": {"backend": "math"}}),
        ("compile: {enabled: blocks, dynamic: false}", {"compile": BLOCKS | {"dynamic": False}}),
        ("compile: blocks", {"compile": BLOCKS}),
        ("compile: max-autotune", {"compile": {"enabled": True, "mode": "max-autotune"}}),
        ("", {}),
        ("# nothing\n", {}),
        ("{}", {}),
    ],
)
def test_other_spellings_mean_the_same(path: Path, text: str, same: dict[str, object]) -> None:
    path.write_text(text, encoding="utf-8")
    assert SpeedConfig.from_yaml(path) == SpeedConfig.from_dict(same)


switch = st.sampled_from(["auto", True, False])
modes = st.sampled_from(["default", "reduce-overhead", "max-autotune"])
compiling = {"enabled": switch, "mode": modes, "fullgraph": st.booleans(), "dynamic": switch}
options = {
    "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:1", "mps", "xpu:0"]),
    "precision": st.sampled_from(["auto", "fp32", "bf16", "fp16"]),
    "sdpa": st.sampled_from(["auto", "flash", "efficient", "cudnn", "math"]),
    "fused_optimizer": switch | st.fixed_dictionaries({"enabled": switch}),
    "compile": switch | st.fixed_dictionaries({}, optional=compiling),
}
configs = st.fixed_dictionaries({}, optional=options)


@examples(80)
@given(values=configs)
def test_saving_and_loading_loses_nothing(path: Path, values: dict[str, object]) -> None:
    config = SpeedConfig.from_dict(values)
    assert SpeedConfig.from_dict(config.to_dict()) == config
    path.write_text(yaml.safe_dump(config.to_dict()), encoding="utf-8")
    assert SpeedConfig.from_yaml(path) == config


COMPILE = {"enabled": True, "mode": "max-autotune"}
OTHERWISE = {"precision": "fp16", "compile": COMPILE, "device": "cuda"}


@pytest.mark.parametrize(
    ("variable", "word", "name", "value"), [
    ("SPEEDKIT_PRECISION", " FP32 ", "precision", "fp32"),
    ("SPEEDKIT_COMPILE", "0", "compile", False), ("SPEEDKIT_COMPILE", "auto", "compile", "auto"),
    ("SPEEDKIT_DEVICE", "cpu", "device", "cpu")],
)  # fmt: skip
def test_the_environment_wins_over_files_and_dicts(path, monkeypatch, variable, word, name, value):
    path.write_text(yaml.safe_dump(OTHERWISE), encoding="utf-8")
    monkeypatch.setenv(variable, word)
    expected = getattr(SpeedConfig.from_dict({name: value}), name)
    for config in (SpeedConfig.from_yaml(path), SpeedConfig.from_dict(OTHERWISE), SpeedConfig()):
        assert getattr(config, name) == expected
        decision = plan(config)[name]
        assert decision.source == "env"
        assert variable in decision.reason


FACTS = Facts(parameters=10**7, convolutions=20, blocks=8, optimizers=(OptimizerFacts(),))


def loaded(name: str) -> SpeedConfig:
    return SpeedConfig.from_yaml(CONFIGS / f"{name}.yaml")


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_each_says_what_it_is_for_and_is_planned_on_every_machine(hardware, name):
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert set(yaml.safe_load(text)) <= {ALONE, *(entry.name for entry in CATALOG)}
    config = loaded(name)
    for machine in machines.names():
        assert all(decision.reason for decision in plan(config, hardware(machine), FACTS))


def _line(name: str, value: object, words: str) -> str:
    return f"{f'{name}: {yaml.safe_dump(value).splitlines()[0]}':<34}# {words}"


def auto() -> str:
    """Return the text of auto.yaml: each option of the catalog, its default and description."""
    lines = [
        "# Every option, all decided by SpeedKit. `%speedkit report` shows the reasons.",
        _line(ALONE, False, "true: auto options stay unchanged"),
    ]
    for entry in CATALOG:
        if not entry.fields:
            words = SpeedConfig.model_fields[entry.name].description
            lines.append(_line(entry.name, entry.default, str(words)))
            continue
        lines.append(f"{entry.name}:")
        for name, info in entry.fields.items():
            lines.append(_line(f"  {name}", info.default, str(info.description)))
    return "\n".join(lines) + "\n"


def test_auto_has_every_option_with_its_words(request):
    """Compare auto.yaml with the catalog; `--regenerate-plans` rewrites the file."""
    if request.config.getoption("--regenerate-plans"):
        (CONFIGS / "auto.yaml").write_text(auto(), encoding="utf-8")
    assert (CONFIGS / "auto.yaml").read_text(encoding="utf-8") == auto()


def test_exact_turns_on_nothing_that_rounds_anywhere(hardware):
    for machine in machines.names():
        for decision in plan(loaded("exact"), hardware(machine), FACTS):
            assert not decision.active or named(decision.name).effect is Effect.EXACT


MEANT_FOR = {
    "colab_t4": "t4", "kaggle_t4x2": "t4", "training_max": "a100", "inference_max": "a100",
    "low_memory": "t4", "exact": "a100",
}  # fmt: skip


@pytest.mark.parametrize("name", MEANT_FOR)
def test_where_it_is_meant_for_nothing_is_declined(hardware, name):
    facts = FACTS if name != "exact" else FACTS.moved("cuda:0")
    if name == "inference_max":
        facts = replace(facts, optimizers=(), training=False)
    found = plan(loaded(name), hardware(MEANT_FOR[name]), facts)
    assert [decision.name for decision in found if decision.declined] == []
