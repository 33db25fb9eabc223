"""lm-evaluation-harness through a cache: exact where the cache is, the cache's own numbers elsewhere, nothing fetched.

The harness' own `hf` model and a loop of single tokens written here are what the scores are held to.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import kvplug
from evals import models
from evals.errors import InputError
from evals.models import forward, load

pytest.importorskip("lm_eval", reason="the lm-eval extra is not installed")
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from evals.lm_eval_model import CachedLM

ROOT = Path(__file__).parents[2]
EXACT = ["dense", "transformers:dynamic", "transformers:static"]
# By default the tokens of so short a text would all stay as they came in.
INT4 = "int4:group_size=4,residual=0,sinks=0"
LOSSY = [INT4, "window:window=8", "streaming:sinks=2,window=10+int8"]
LINE = "The harbour was quiet at dawn, and the boats lay side by side along the wall. "
# Without a space at the end, which the harness would move over to the continuation.
TEXTS = [LINE[i : 40 + 9 * i].rstrip() for i in range(4)]
CHOICES = [" gulls", " a bell rang", "?", " no one spoke of it"]
PAIRS = [(text, choice) for text in TEXTS for choice in CHOICES]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Nothing may be fetched, nor tried where the failure would be swallowed."""
    tried = []

    def refuse(self, address):
        tried.append(address)
        raise OSError(f"a test tried to reach {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert not tried


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """The tiny model with an end-of-text token, which the harness can't do without: a byte that no text has."""
    folder = tmp_path_factory.mktemp("ending")
    tiny = load(str(tiny_folder))
    tiny.tokenizer.eos_token = tiny.tokenizer.convert_ids_to_tokens(tiny.tokenizer("\0")["input_ids"])[0]
    tiny.model.config.eos_token_id = tiny.model.generation_config.eos_token_id = tiny.tokenizer.eos_token_id
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def plain(folder):
    return HFLM(pretrained=folder, device="cpu")


@pytest.fixture
def through(folder):
    """`through(cache, ...)`: the tiny model whose scores go through that cache."""
    return lambda cache, **arguments: CachedLM(pretrained=folder, cache=cache, device="cpu", **arguments)


def asked(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def scores(lm, pairs=PAIRS):
    return torch.tensor([nats for nats, _ in lm.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)])


def rolled(lm, texts):
    return torch.tensor(lm.loglikelihood_rolling(asked("loglikelihood_rolling", [(t,) for t in texts]), True))


@torch.no_grad()
def by_hand(tiny, spec, context, continuation, step):
    """Nats of the continuation: the context but for its last byte in one forward, the rest `step` bytes at a time."""
    ids = tiny.tokenizer(context + continuation, return_tensors="pt")["input_ids"]
    cache = kvplug.from_spec(spec, tiny.model)
    held, fed = len(context) - 1, ids.shape[1] - 1
    forward(tiny.model, ids[:, :held], cache)
    logits = [forward(tiny.model, ids[:, i : min(i + step, fed)], cache).logits[0] for i in range(held, fed, step)]
    return torch.cat(logits).log_softmax(-1).gather(1, ids[0, held + 1 :, None]).sum().item()


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("cache", EXACT)
def test_an_exact_cache_scores_as_the_harness_does(plain, through, cache, step):
    """1e-4 is fp32's rounding, summed over twenty tokens."""
    assert torch.allclose(scores(through(cache, step=step)), scores(plain), rtol=0, atol=1e-4)


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("cache", LOSSY)
def test_a_lossy_cache_scores_what_was_read_back(folder, plain, through, cache, step):
    got = scores(through(cache, step=step))
    tiny = load(folder)
    expected = torch.tensor([by_hand(tiny, cache, *pair, step) for pair in PAIRS])
    assert torch.allclose(got, expected, rtol=0, atol=1e-4)
    # Ten times the rounding for 4 bits; a window of eight tokens is another context altogether.
    least = 1e-3 if cache == INT4 else 0.1
    assert ((got - scores(plain)).abs() > least).all()


def test_the_first_prediction_reads_back_too(plain, through):
    """A one-token answer is judged by logits that the prompt's own forward would give exactly."""
    pairs = [(text, "?") for text in TEXTS]
    assert ((scores(through(INT4), pairs) - scores(plain, pairs)).abs() > 1e-4).all()


def test_more_than_one_token_at_a_time_is_another_measurement(through):
    assert not torch.allclose(scores(through("window:window=8", step=8)), scores(through("window:window=8")), atol=0.1)


@pytest.mark.parametrize("cache", ["dense", INT4])
def test_what_greedy_decoding_would_say_is_told(folder, through, cache):
    """The continuation that the same cache generates is greedy; with its last letter changed it is not."""
    lm = through(cache)
    tiny = load(folder)
    ids = tiny.tokenizer(TEXTS[1], return_tensors="pt")["input_ids"]
    held = kvplug.from_spec(cache, tiny.model)
    forward(tiny.model, ids[:, :-1], held)
    said = [ids[0, -1].item()]
    for _ in range(6):
        with torch.no_grad():
            said.append(forward(tiny.model, torch.tensor([said[-1:]]), held).logits[0, -1].argmax().item())
    other = [*said[1:-1], (said[-1] + 1) % 256]
    requests = [(None, ids[0].tolist(), said[1:]), (None, ids[0].tolist(), other)]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(requests, disable_tqdm=True)] == [True, False]


def test_answers_that_differ_in_their_last_token_are_fed_once(through, monkeypatch):
    lm = through(INT4)
    apart = torch.cat([scores(lm, [(TEXTS[0], letter)]) for letter in "ABCD"])
    fed = []
    real = models.forward
    monkeypatch.setattr(
        models, "forward", lambda model, ids, *a, **k: fed.append(ids.shape[1]) or real(model, ids, *a, **k)
    )
    assert torch.equal(scores(lm, [(TEXTS[0], letter) for letter in "ABCD"]), apart)
    assert fed == [len(TEXTS[0]) - 1, 1]


def test_a_context_that_is_too_long_loses_its_beginning(folder, through):
    plain = HFLM(pretrained=folder, device="cpu", max_length=24)
    assert torch.allclose(scores(through("dense", max_length=24)), scores(plain), rtol=0, atol=1e-4)


def test_whole_texts_are_read_back_in_steps(folder, through):
    """Windows of 64 tokens, so that a text has several."""
    texts = [LINE * 2, LINE[:30]]
    expected = rolled(HFLM(pretrained=folder, device="cpu", max_length=64, batch_size=2), texts)
    assert torch.allclose(rolled(through("dense", max_length=64, step=5), texts), expected, rtol=0, atol=1e-3)
    assert ((rolled(through(INT4, max_length=64, step=5), texts) - expected).abs() > 1e-2).all()
    assert ((rolled(through("window:window=8", max_length=64), texts) - expected).abs() > 1).all()


def generated(lm):
    arguments = [(text, {"until": ["\n"], "max_gen_toks": 12}) for text in TEXTS]
    return lm.generate_until(asked("generate_until", arguments), disable_tqdm=True)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("cache", ["transformers:static", "dense", *LOSSY])
def test_generation_goes_through_the_cache(folder, plain, through, cache, batch_size):
    """Batches are padded on the left; by hand each text goes alone."""
    got = generated(through(cache, batch_size=batch_size))
    if cache in EXACT:
        assert got == generated(plain)
        return
    tiny = load(folder)
    for text, said in zip(TEXTS, got, strict=True):
        inputs = tiny.tokenizer(text, return_tensors="pt")
        made = tiny.model.generate(
            **inputs,
            past_key_values=kvplug.from_spec(cache, tiny.model),
            max_new_tokens=12,
            do_sample=False,
        )
        expected = tiny.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert said == expected.split("\n")[0]
    if cache != INT4:
        assert got != generated(plain)


@pytest.mark.parametrize("kind", ["score", "generate"])
def test_a_model_that_leaves_the_cache_alone_is_a_fault(through, monkeypatch, kind):
    lm = through(INT4)
    if kind == "score":
        monkeypatch.setattr(models, "forward", lambda model, ids, cache, **others: model(ids, use_cache=False))
    else:
        real = lm.model.generate
        without = {"cache", "past_key_values"}
        monkeypatch.setattr(lm.model, "generate", lambda **a: real(**{name: a[name] for name in a.keys() - without}))
    with pytest.raises(RuntimeError, match="its cache saw 0 of them"):
        scores(lm) if kind == "score" else generated(lm)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of three tasks over one local file, in the harness' own format."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"text": text, "choices": CHOICES, "answer": i % 4} for i, text in enumerate(TEXTS)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kinds = {
        "local_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        "local_generation": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
            "metric_list": [{"metric": "exact_match"}],
        },
        "local_text": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    }
    for name, kind in kinds.items():
        data = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "datasets")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **kind}
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    return folder


def evaluated(tasks, model, arguments):
    return simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["local_choice", "local_generation", "local_text"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
    )


def answers(done, task):
    return [sample["filtered_resps"] for sample in done["samples"][task]]


def test_tasks_run_through_the_cache(tasks, folder):
    own = evaluated(tasks, "hf", f"pretrained={folder}")
    dense = evaluated(tasks, "kvplug", f"pretrained={folder},cache=dense")
    small = evaluated(tasks, "kvplug", f"pretrained={folder},cache=streaming:sinks=2/window=6+int4,step=2")
    for task, metric in (("local_choice", "acc"), ("local_generation", "exact_match"), ("local_text", "bits_per_byte")):
        key = f"{metric},none"
        assert dense["results"][task][key] == pytest.approx(own["results"][task][key], abs=1e-4)
        assert answers(small, task) != answers(dense, task)
    assert answers(dense, "local_generation") == answers(own, "local_generation")
    told = small["config"]
    assert (told["kvplug_cache"], told["kvplug_step"]) == ("streaming:sinks=2,window=6+int4", 2)


def command_line(tasks, folder, cache):
    options = ["--model", "kvplug", "--model_args", f"pretrained={folder},cache={cache}", "--tasks", "local_choice"]
    return subprocess.run(
        [sys.executable, "-m", "evals.lm_eval_model", *options, "--include_path", tasks, "--device", "cpu"],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_command_prints_the_table_of_the_harness(tasks, folder):
    done = command_line(tasks, folder, "int4")
    assert done.returncode == 0, done.stderr
    assert "local_choice" in done.stdout and "|acc" in done.stdout and "'cache': 'int4'" in done.stdout


def test_a_typo_on_the_command_line_is_one_line_and_exit_code_two(tasks, folder):
    done = command_line(tasks, folder, "int44")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --model_args: cache: 'int44'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "cache is missing"),
        ({"cache": "int44"}, "cache: 'int44'.*int4"),
        ({"cache": "transformers:int4"}, "cache: 'transformers:int4' is unknown"),
        (
            {"cache": "streaming:sinks=4", "window": "508+int4"},
            "window=508.int4 belongs to the cache.*cache=streaming:sinks=4/window=508.int4",
        ),
        ({"cache": "int4", "step": 0}, "step: got 0, accepted is a whole number"),
        ({"cache": "int4", "step": "two"}, "step: got 'two'"),
        ({"cache": "int4", "pretrained": "no/such/model"}, "pretrained: can't load 'no/such/model'"),
    ],
    ids=["no cache", "spec", "baseline", "torn spec", "step", "step as text", "model"],
)
def test_what_cannot_be_done_names_the_argument(folder, arguments, named, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=f"^--model_args: .*{named}") as raised:
        CachedLM(**{"pretrained": folder, "device": "cpu", **arguments})
    assert "\n" not in str(raised.value)


def test_a_model_with_an_encoder_is_refused(folder, tmp_path):
    T5ForConditionalGeneration(
        T5Config(vocab_size=256, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"^--model_args: pretrained: .* is seq2seq; accepted is a causal model"):
        CachedLM(pretrained=str(tmp_path), tokenizer=folder, cache="int4", device="cpu")
