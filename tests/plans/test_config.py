from __future__ import annotations

from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from speedkit_jupyter import ConfigError, SpeedConfig, plan

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "speed.yaml"


def problems(path: Path, text: str) -> tuple[str, ...]:
    """The problems of a file with this text, without the file's folder."""
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        SpeedConfig.from_yaml(path)
    return tuple(one.replace(f"{path.parent}/", "") for one in caught.value.problems)


# --- mistakes in files ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# mine\nprecison: bf16\n", "line 2: precison: unknown key; allowed: device, threads"),
        ("precison: bf16", "Did you mean 'precision'?"),
        (
            "compile:\n  mode: default\n  enabel: true\n",
            "line 1: compile.enabel: unknown key; allowed: enabled, scope, mode, fullgraph, "
            "dynamic, backend, required, background. Did you mean 'enabled'?",
        ),
        (
            "precision: bf61",
            "line 1: precision: 'bf61' is not allowed; allowed: auto, fp32, bf16, fp16. Did you "
            "mean 'bf16'?",
        ),
        ("precision: bf16\nprecision: fp16\n", "line 2: precision: this key is there twice"),
        ("compile:\n  mode: default\n  mode: default\n", "line 3: compile.mode: this key is there"),
        (
            "tf32: high\ntf32_matmul_precision: high\n",
            "line 2: tf32_matmul_precision: the same as 'tf32', which is there too",
        ),
        ("a: [", "line 1: YAML syntax: "),
        ("a: b: c", "line 1: YAML syntax: "),
        ("a: 1\n\tb: 2", "line 2: YAML syntax: "),
        ("- 1\n- 2", "line 1: a config is a mapping, as in 'precision: auto'"),
        ("3", "line 1: a config is a mapping, as in 'precision: auto'"),
        ("precision: bf16\nalone: maybe", "line 2: alone: 'maybe' is not allowed; allowed: true"),
        ("alnoe: true", "Did you mean 'alone'?"),
    ],
)
def test_a_mistake_names_file_line_and_what_is_right(path: Path, text: str, message: str) -> None:
    (problem,) = problems(path, text)
    assert problem.startswith("speed.yaml, line ")
    assert message in problem


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("precision: [1]", "precision: [1]"),
        ("precision: no", "precision: False"),
        ("threads: true", "threads: True"),
        ("threads: 0", "threads: 0"),
        ("compile:", "compile.enabled: None"),
        ("compile: [true]", "compile.enabled: [True]"),
        ("compile: {mode: {a: 1}}", "compile.mode: {'a': 1}"),
        ("compile: {fullgraph: 1}", "compile.fullgraph: 1"),
        ("sdpa: {backend: 3}", "sdpa.backend: 3"),
        ("device: cuda:-1", "device: 'cuda:-1'"),
    ],
)
def test_wrong_type_or_range_is_named(path: Path, text: str, key: str) -> None:
    (problem,) = problems(path, text)
    assert problem.startswith(f"speed.yaml, line 1: {key} is not allowed; allowed: ")


def test_missing_file_names_the_nearest_one_beside_it() -> None:
    with pytest.raises(ConfigError, match=r"there is no such file. Did you mean 'auto.yaml'\?"):
        SpeedConfig.from_yaml(CONFIGS / "atuo.yaml")


def test_a_file_that_is_not_utf8_is_refused_by_name(path: Path) -> None:
    path.write_bytes(b"precision: \xff")
    with pytest.raises(ConfigError, match=r"speed\.yaml: can't be read: 'utf-8' codec"):
        SpeedConfig.from_yaml(path)


# --- what may be written ---


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("tf32_matmul_precision: high", {"tf32": "high"}),
        ("optimizer: {fused: true}", {"fused_optimizer": {"enabled": True}}),
        ("compile: false", {"compile": {"enabled": False}}),
        ("compile: on", {"compile": {"enabled": True}}),
        ("sdpa: math", {"sdpa": {"backend": "math"}}),
        ("compile: blocks", {"compile": {"enabled": True, "scope": "blocks"}}),
        (
            "compile: {enabled: blocks, dynamic: false}",
            {"compile": {"enabled": True, "scope": "blocks", "dynamic": False}},
        ),
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
configs = st.fixed_dictionaries(
    {},
    optional={
        "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:1", "mps", "xpu:0"]),
        "precision": st.sampled_from(["auto", "fp32", "bf16", "fp16"]),
        "sdpa": st.sampled_from(["auto", "flash", "efficient", "cudnn", "math"]),
        "fused_optimizer": switch | st.fixed_dictionaries({"enabled": switch}),
        "compile": switch
        | st.fixed_dictionaries(
            {},
            optional={
                "enabled": switch,
                "mode": st.sampled_from(["default", "reduce-overhead", "max-autotune"]),
                "fullgraph": st.booleans(),
                "dynamic": switch,
            },
        ),
    },
)


@examples(80)
@given(values=configs)
def test_saving_and_loading_loses_nothing(path: Path, values: dict[str, object]) -> None:
    config = SpeedConfig.from_dict(values)
    assert SpeedConfig.from_dict(config.to_dict()) == config
    text = config.to_yaml(path)
    assert path.read_text(encoding="utf-8") == text
    assert SpeedConfig.from_yaml(path) == config


def test_alone_is_kept_by_files_and_dicts(path: Path) -> None:
    config = SpeedConfig(precision="bf16").alone()
    config.to_yaml(path)
    assert SpeedConfig.from_yaml(path) == config == SpeedConfig.from_dict(config.to_dict())
    assert config.is_alone
    assert not SpeedConfig.from_dict({"alone": False}).is_alone


# --- the environment ---

FROM_THE_ENVIRONMENT = [
    ("SPEEDKIT_PRECISION", " FP32 ", "precision", "fp32"),
    ("SPEEDKIT_COMPILE", "0", "compile", False),
    ("SPEEDKIT_COMPILE", "auto", "compile", "auto"),
    ("SPEEDKIT_DEVICE", "cpu", "device", "cpu"),
]
OTHERWISE = {
    "precision": "fp16",
    "compile": {"enabled": True, "mode": "max-autotune"},
    "device": "cuda",
}


@pytest.mark.parametrize(("variable", "word", "name", "value"), FROM_THE_ENVIRONMENT)
def test_the_environment_wins_over_files_and_dicts(
    path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, word: str, name: str, value: object
) -> None:
    SpeedConfig.from_dict(OTHERWISE).to_yaml(path)
    monkeypatch.setenv(variable, word)
    expected = getattr(SpeedConfig.from_dict({name: value}), name)
    for config in (SpeedConfig.from_yaml(path), SpeedConfig.from_dict(OTHERWISE), SpeedConfig()):
        assert getattr(config, name) == expected
        decision = plan(config)[name]
        assert decision.source == "env"
        assert variable in decision.reason


@pytest.mark.parametrize(
    ("variable", "word", "key"),
    [
        ("SPEEDKIT_PRECISION", "bf61", "precision: 'bf61'"),
        ("SPEEDKIT_PRECISION", "²", "precision: '²'"),
        ("SPEEDKIT_COMPILE", "maybe", "compile.enabled: 'maybe'"),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, word: str, key: str
) -> None:
    monkeypatch.setenv(variable, word)
    with pytest.raises(ConfigError) as caught:
        SpeedConfig()
    (problem,) = caught.value.problems
    assert problem.startswith(f"environment variable {variable}: {key} is not allowed; allowed: ")
