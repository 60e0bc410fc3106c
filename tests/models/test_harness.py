"""Tasks of lm-evaluation-harness, written to disk, give what the model itself says of their texts."""

import json
import math

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'lin-attn[lm-eval]'")

from types import SimpleNamespace

from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from models.cli import main
from models.harness import LinAttnLM
from models.scoring import score_texts
from tests.models.test_generation import NETWORKS, build

QUESTIONS = [
    {"question": "x =", "choices": ["1", "22"], "answer": 0},
    {"question": "def f", "choices": ["(x):", "oo"], "answer": 1},
    {"question": "import ", "choices": ["numpy", "os"], "answer": 1},
]
TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
""",
    "tiny_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[0]}}"
metric_list: [{metric: bits_per_byte}]
""",
    "tiny_text": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["q", "ab"], max_gen_toks: 12, do_sample: false, temperature: 0.0, top_p: 0.9}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def tasks(tmp_path):
    lines = tmp_path / "questions.jsonl"
    lines.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {lines}}}}}\ntest_split: test"
        (folder / f"{name}.yaml").write_text(head + text)
    return folder


def asked(*requests):
    return [SimpleNamespace(args=request) for request in requests]


def by_hand(model, context, continuation):
    tokens = torch.tensor([256, *context.encode(), *continuation.encode()])
    logprobs = model(tokens[None, :-1])[0].log_softmax(-1)[-len(continuation.encode()) :]
    wanted = tokens[-len(continuation.encode()) :]
    total = logprobs.gather(1, wanted[:, None]).sum().item()
    return total, bool((logprobs.argmax(-1) == wanted).all())


@pytest.mark.parametrize("name", NETWORKS)
def test_likelihoods_are_those_of_the_tokens_after_the_end_of_a_document(name):
    model = build(NETWORKS[name])
    harness = LinAttnLM(model, batch_size=2)
    greedy = model.complete("def", 4, temperature=0)
    pairs = [("x = ", "1"), ("", "def f"), ("a longer context ", " and more"), ("def", greedy)]
    found = harness.loglikelihood(asked(*pairs), disable_tqdm=True)
    for (context, continuation), (total, is_greedy) in zip(pairs, found, strict=True):
        # the harness moves a context's last blanks to the continuation
        bare = context.rstrip()
        wanted, wanted_greedy = by_hand(model, bare, context[len(bare) :] + continuation)
        assert total == pytest.approx(wanted, rel=1e-5)
        assert is_greedy == wanted_greedy
    texts = ["def f(x):\n", "a", "", "ab" * 25]
    rolled = harness.loglikelihood_rolling(asked(*((text,) for text in texts)), disable_tqdm=True)
    for total, score in zip(rolled, score_texts(model, texts, with_end=False), strict=True):
        assert total == pytest.approx(-score.nats, rel=1e-5)


def test_generation_is_that_of_complete_by_its_own_options():
    model = build({})
    requests = [
        ("def ", {"until": ["\n"], "max_gen_toks": 9}),
        ("import numpy ", {"until": ["a", "bc"], "max_gen_toks": 20, "do_sample": False, "temperature": 0.7}),
        ("x", {"until": "\n", "max_gen_toks": 9}),
        ("ab", {"until": ["\n"], "max_gen_toks": 9}),
    ]
    wanted = [
        model.complete("def ", 9, stop=["\n"], temperature=0),
        model.complete("import numpy ", 20, stop=["a", "bc"], temperature=0),
        model.complete("x", 9, stop=["\n"], temperature=0),
        model.complete("ab", 9, stop=["\n"], temperature=0),
    ]
    assert LinAttnLM(model, batch_size=2).generate_until(asked(*requests), disable_tqdm=True) == wanted
    sampled = {"until": [], "max_gen_toks": 9, "do_sample": True, "temperature": 1.5, "top_k": 40}
    torch.manual_seed(1)
    [text] = LinAttnLM(model).generate_until(asked(("x", sampled)), disable_tqdm=True)
    torch.manual_seed(1)
    assert text == model.complete("x", 9, temperature=1.5, top_k=40)
    with pytest.raises(ValueError, match="num_beams"):
        LinAttnLM(model).generate_until(asked(("x", {"num_beams": 3})), disable_tqdm=True)


def test_where_positions_end_a_context_loses_its_beginning_and_a_text_is_read_in_windows():
    model = build(NETWORKS["linear learned"])  # 64 positions
    harness, long = LinAttnLM(model), "abcdefgh" * 20
    tokens = torch.tensor([*long.encode(), *b"xy"])[-65:]
    logprobs = model(tokens[None, :-1])[0].log_softmax(-1)
    wanted = logprobs[-2, ord("x")] + logprobs[-1, ord("y")]
    [(total, _)] = harness.loglikelihood(asked((long, "xy")), disable_tqdm=True)
    assert total == pytest.approx(wanted.item(), rel=1e-5)
    [rolled] = harness.loglikelihood_rolling(asked((long,)), disable_tqdm=True)
    assert -rolled / math.log(2) / len(long) == pytest.approx(8, abs=3)
    assert harness.generate_until(asked((long, {"until": [], "max_gen_toks": 30})), disable_tqdm=True)
    assert LinAttnLM(model, max_length=10).max_length == 10
    for options in ({"max_length": 0}, {"batch_size": "auto"}, {"max_batch_size": 3}):
        with pytest.raises(ValueError, match=next(iter(options))):
            LinAttnLM(model, **options)


def test_the_harness_runs_its_tasks_on_the_model_by_name(tasks):
    assert get_model("lin-attn") is LinAttnLM
    model = build({})
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(
        model=LinAttnLM(model, batch_size=2), tasks=list(TASKS), task_manager=manager, bootstrap_iters=0
    )
    right = 0
    for question in QUESTIONS:
        bare = question["question"].rstrip()  # the harness sets a blank between, and counts blanks with the choice
        blanks = question["question"][len(bare) :] + " "
        totals = [by_hand(model, bare, blanks + choice)[0] for choice in question["choices"]]
        right += int(totals[question["answer"]] == max(totals))
    assert found["results"]["tiny_choice"]["acc,none"] == pytest.approx(right / 3)
    texts = [f"{question['question']} {question['choices'][0]}" for question in QUESTIONS]
    nats = sum(score.nats for score in score_texts(model, texts, with_end=False))
    bits = nats / math.log(2) / sum(map(len, texts))
    assert found["results"]["tiny_rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    answers = [sample["filtered_resps"][0] for sample in found["samples"]["tiny_text"]]
    prompts = [question["question"] for question in QUESTIONS]
    assert answers == model.complete(prompts, 12, stop=["q", "ab"], temperature=0)


@pytest.mark.slow  # an index of all the harness's tasks
def test_the_command_writes_its_results(tasks, tmp_path, capsys):
    model = build({})
    model.save_pretrained(tmp_path / "model")
    arguments = ["lm-eval", "--model", tmp_path / "model", "--tasks", "tiny_choice", "--include-path", tasks]
    arguments += ["--limit", 2, "--json", tmp_path / "results.json", "--device", "cpu"]
    assert main([str(argument) for argument in arguments]) == 0
    assert "tiny_choice" in capsys.readouterr().out
    told = json.loads((tmp_path / "results.json").read_text())
    assert told["results"]["tiny_choice"]["acc,none"] in (0, 0.5, 1)
    arguments[4] = "no_such_task"
    assert main([str(argument) for argument in arguments]) == 2
    assert "no_such_task" in capsys.readouterr().err
