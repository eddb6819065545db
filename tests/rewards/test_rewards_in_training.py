"""Reward functions through the trainer: what they get, what they may return, how they fail.

Files: ``rewards/runtime/loading.py``.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import json
import math
import re
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.resume_runs import make_trainer
from support.runs import chats, count_reward, generate, policy, prompts, tokenizer, trainer
from transformers import LlamaConfig, LlamaForSequenceClassification

from groupwise import ConfigError, RewardError, rewards


def first_batch(run):
    """Rewards and advantages of the first four rows (one prompt, four completions)."""
    rows = [run.train_dataset[0]] * 4
    rewards = run.compute_rewards(generate(run, rows))
    return rewards, run.compute_advantages(rewards)


def test_a_reward_gets_the_rollout_every_column_and_the_state(tmp_path):
    seen = {}

    def reward(**arguments):
        seen.update(arguments)
        return [0.0] * 4

    run = trainer(tmp_path, reward)
    first_batch(run)
    assert seen["prompts"] == [run.train_dataset[0]["prompt"]] * 4
    assert seen["row"] == [0, 0, 0, 0]
    assert [type(text) for text in seen["completions"]] == [str] * 4
    assert all(isinstance(token, int) for ids in seen["completion_ids"] for token in ids)
    assert seen["trainer_state"] is run.state
    assert "prompt" not in seen and callable(seen["log_extra"]) and callable(seen["log_metric"])


def test_chat_prompts_give_chat_completions(tmp_path):
    seen = {}

    def reward(prompts, completions, **_):
        seen.update(prompts=prompts, completions=completions)
        return [0.0] * 4

    first_batch(trainer(tmp_path, reward, train_dataset=chats()))
    assert seen["prompts"][0][0]["role"] == "user"
    assert [set(completion[0]) for completion in seen["completions"]] == [{"role", "content"}] * 4
    assert seen["completions"][0][0]["role"] == "assistant"


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2, 3, 4],
        (1.0, 2.0, 3.0, 4.0),
        np.array([1.0, 2.0, 3.0, 4.0]),
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
        [torch.tensor(1.0), np.float32(2), np.int64(3), 4],
    ],
    ids=["ints", "tuple", "array", "tensor", "zero-d and numpy scalars"],
)
def test_numbers_of_any_kind_are_rewards(tmp_path, returned):
    scored, _ = first_batch(trainer(tmp_path, lambda **_: returned))
    assert scored.rewards_NF[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1.0, 2.0, 3.0], "returned 3 rewards for 4 completions"),
        (1.0, "must return a list"),
        (None, "must return a list"),
        ([1.0, math.nan, 3.0, 4.0], "row 1"),
        ([1.0, 2.0, math.inf, 4.0], "row 2"),
        ([1.0, 2.0, 3.0, "4"], "row 3"),
        ([[(99, 1.0)], [], [], []], "row 0"),
        ([1.0, 1e17, 3.0, 4.0], r"returned 1e+17 (float) for row 1; allowed: a finite number of magnitude"),
        ([1.0, 2.0, 3.0, -(10**400)], "returned an integer of many digits (int) for row 3"),
        ([[(0, 10**400)], [], [], []], "row 0"),
        ([[(0, 1.0)], 0.5, [], None], "the number 0.5 for row 1; return None or an empty list"),
    ],
    ids=[
        *("length", "scalar", "none", "nan", "inf", "string", "step out of range", "beyond float32"),
        *("beyond float", "step beyond float", "number among steps"),
    ],
)
def test_unusable_rewards_name_function_row_prompt_and_completion(tmp_path, returned, said):
    def broken(**_):
        return returned

    with pytest.raises(RewardError, match="'broken'") as caught:
        first_batch(trainer(tmp_path, broken))
    assert said in str(caught.value)
    if "row" in said:
        assert "prompt: 'w0'" in str(caught.value) and "completion: " in str(caught.value)


def test_an_exception_keeps_its_cause(tmp_path):
    def failing(**_):
        return [1 / 0]

    with pytest.raises(RewardError, match="'failing' raised ZeroDivisionError") as caught:
        first_batch(trainer(tmp_path, failing))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_failing_async_reward_is_named_too(tmp_path):
    async def failing(**_):
        raise KeyError("answer")

    with pytest.raises(RewardError, match="'failing' raised KeyError"):
        first_batch(trainer(tmp_path, failing))


def test_a_failing_reward_is_counted_and_has_no_value(tmp_path):
    def failing(**_):
        raise KeyError("answer")

    def counting(**_):
        return [1.0, 2.0, 3.0, 4.0]

    run = trainer(tmp_path, [failing, counting], reward_on_error="none")
    scored, advantages = first_batch(run)
    assert scored.metrics["rewards/failing/errors"].value() == 1.0
    assert scored.metrics["rewards/counting/errors"].value() == 0.0
    assert "rewards/failing/mean" not in scored.metrics
    alone, expected = first_batch(trainer(tmp_path, counting))
    assert torch.equal(advantages, expected)
    assert not any(name.endswith("/errors") for name in alone.metrics)


def test_a_reward_that_takes_too_long_is_reported(tmp_path):
    def slow(**_):
        time.sleep(60)

    with pytest.raises(RewardError, match=r"'slow' raised .*within 0\.1 seconds \(reward_timeout\)"):
        first_batch(trainer(tmp_path, slow, reward_timeout=0.1))


@pytest.mark.timeout(60)
def test_async_rewards_wait_together(tmp_path):
    arrived = []

    def waiting(name):
        async def reward(completions, **_):
            arrived.append(name)
            while len(arrived) < 2:  # never ends if they run one after the other
                await asyncio.sleep(0.01)
            return [1.0] * len(completions)

        return reward

    async def both(run):
        return first_batch(run)

    run = trainer(tmp_path, [waiting("a"), waiting("b")])
    # Inside a running event loop, as in a notebook.
    scored, _ = asyncio.run(both(run))
    assert scored.rewards_NF.shape == (4, 2)


def test_none_is_no_reward(tmp_path):
    run = trainer(
        tmp_path,
        [lambda **_: [1.0, None, 3.0, None], lambda **_: [1.0, 5.0, None, None]],
        reward_weights=[1.0, 2.0],
        scale_rewards="none",
    )
    _, advantages = first_batch(run)
    # weighted sums 1 + 2·1 = 3, 2·5 = 10, 3, none; mean of the three 16/3
    assert advantages.tolist() == pytest.approx([3 - 16 / 3, 10 - 16 / 3, 3 - 16 / 3, 0.0])


def test_a_function_that_never_scores_logs_nothing(tmp_path):
    run = trainer(tmp_path, [lambda **_: [None] * 4, lambda **_: [1.0, 2.0, 3.0, 4.0]], max_steps=1)
    run.train()
    names = set(run.state.log_history[0])
    assert {"time/reward/<lambda>", "time/reward/<lambda>_2"} <= names
    assert "rewards/<lambda>/mean" not in names and "rewards/<lambda>_2/mean" in names


def test_step_rewards_reach_the_tokens_before_them(tmp_path):
    def stepwise(completion_ids, **_):
        return [[(0, 1.0), (len(ids) - 1, 0.0)] for ids in completion_ids]

    run = trainer(tmp_path, stepwise, scale_rewards="none")
    rollouts = generate(run, [run.train_dataset[0]] * 4)
    advantages_NT = run.compute_advantages(run.compute_rewards(rollouts))
    lengths = [len(completion.token_ids) for completion in rollouts.completions]
    row = lengths.index(max(lengths))
    assert lengths[row] > 1
    # rewards 1 and 0 in every completion: mean 1/2, so the steps carry +1/2 and −1/2
    assert advantages_NT[row, 0].item() == pytest.approx(0.0)
    assert advantages_NT[row, 1 : lengths[row]].tolist() == pytest.approx([-0.5] * (lengths[row] - 1))
    run.train()
    assert run.state.global_step == 2


def test_logged_columns_and_metrics_arrive(tmp_path):
    def reward(completions, log_extra, log_metric, **_):
        log_extra("length", [len(text) for text in completions])
        log_metric("seen", 2.5)
        return [1.0, 2.0, 3.0, 4.0]

    run = trainer(tmp_path, reward, max_steps=1, log_completions=True, num_completions_to_print=0)
    run.train()
    assert run.state.log_history[0]["seen"] == 2.5
    import pandas

    (table,) = (tmp_path / "completions").glob("*.parquet")
    assert "length" in pandas.read_parquet(table).columns


@pytest.mark.slow
def test_the_judge_of_the_documentation_keeps_its_limits_and_survives_an_outage(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    (code,) = re.findall(r"```python\n(import asyncio\n\nimport aiolimiter.*?)```", page, flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)

    async def request(text):
        running.append(text)
        most.append(len(running))
        asked.append(text)
        await asyncio.sleep(0.001)
        running.remove(text)
        if text in broken or (text == "b" and asked.count("b") < 3):
            raise ConnectionError("down")
        return "5"

    async def no_wait(seconds):
        waits.append(seconds)

    def limit(number):  # of one event loop: that of all steps of a trainer
        per_minute = namespace["aiolimiter"].AsyncLimiter(300, 60)
        namespace.update(concurrent=asyncio.Semaphore(number), per_minute=per_minute)

    running, most, asked, waits, broken = [], [], [], [], {"a"}
    namespace["request"], namespace["grade"].retry.sleep = request, no_wait
    texts = [chr(97 + i) for i in range(26)]
    assert asyncio.run(namespace["judge"](texts)) == [None, *[0.5] * 25]
    assert max(most) == 16 and asked.count("a") == 6 and asked.count("b") == 3 and len(waits) == 5 + 2
    most.clear()
    limit(2)
    run = trainer(tmp_path, [namespace["judge"], count_reward], reward_on_error="none")
    run.train()
    assert max(most) == 2 and [log["rewards/judge/mean"] for log in run.state.log_history[:2]] == [0.5, 0.5]

    async def down(text):
        raise ConnectionError("down")

    namespace["request"] = down
    limit(2)
    run = trainer(tmp_path, [namespace["judge"], count_reward], reward_on_error="none")
    run.train()
    log = run.state.log_history[0]
    assert log["rewards/judge/errors"] == 1 and log["reward"] == log["rewards/count_reward/mean"]
    with pytest.raises(RewardError, match="'judge' raised ConnectionError: down"):
        limit(2)
        trainer(tmp_path, namespace["judge"]).train()


@pytest.mark.slow
def test_every_name_in_the_log_is_refused_as_the_name_of_a_metric(tmp_path):
    def reward(completion_ids, log_metric, **_):
        log_metric("custom/reward", 7.0)
        return [float(sum(ids) % 5) for ids in completion_ids]

    options = {"beta": 0.1, "entropy_coef": 0.1, "eval_pass_at_k": [1, 2], "dynamic_sampling": True}
    run = trainer(tmp_path, [reward, count_reward], max_steps=2, eval_dataset=prompts(2), **options)
    run.evaluate()
    run.train()
    run.evaluate()
    names = {name.removeprefix("eval_") for line in run.state.log_history for name in line}
    assert {"custom/reward", "pass@2", "pass@2_gain", "train_loss", "learning_rate", "runtime"} <= names
    for name in names - {"custom/reward"}:
        with pytest.raises(ValueError, match=re.escape(f"record_metric({name!r}, ...): the trainer logs")):
            run.record_metric(name, 1.0)

    def overwriting(completions, log_metric, **_):
        log_metric("num_tokens", 1.0)
        return [0.0] * len(completions)

    with pytest.raises(
        RewardError, match=r"'overwriting' .* log_metric\('num_tokens', ...\): the trainer logs"
    ):
        first_batch(trainer(tmp_path, overwriting))


@pytest.mark.parametrize("values", [[1, 2, 3], [1, 2, 3, 4, 5], []], ids=len)
def test_a_logged_column_of_another_length_names_the_function(tmp_path, values):
    def labelling(log_extra, **_):
        log_extra("label", values)
        return [1.0, 2.0, 3.0, 4.0]

    message = rf"'labelling' raised ValueError: log_extra\('label', ...\) has {len(values)} values for 4"
    with pytest.raises(RewardError, match=message):
        first_batch(trainer(tmp_path, labelling))


def test_numpy_values_that_rewards_log_are_plain_in_a_checkpoint(tmp_path):
    def reward(completions, log_extra, log_metric, **_):
        log_extra("score", list(np.linspace(0, 1, 4)))
        log_extra("index", np.arange(4))
        log_extra("right", list(np.arange(4) > 1))
        log_extra(np.str_("word"), [np.str_("w"), None, torch.tensor(2.5), object])
        log_metric(np.str_("seen"), np.float64(2.5))
        return [1.0, 2.0, 3.0, 4.0]

    # No log before the checkpoint, which therefore contains the rows of the table.
    settings = {"log_completions": True, "num_completions_to_print": 0, "logging_steps": 2}
    settings |= {"save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, reward, **settings, max_steps=1).train()
    resumed = trainer(tmp_path, reward, **settings, max_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    from pyarrow import parquet

    table = parquet.read_table(tmp_path / "completions" / "completions_00002.parquet").to_pydict()
    assert table["score"] == [0.0, 1 / 3, 2 / 3, 1.0] * 2
    assert table["index"] == [0.0, 1.0, 2.0, 3.0] * 2
    assert table["right"] == [False, False, True, True] * 2
    assert table["word"][:3] == ["w", None, "2.5"]


def test_a_reward_that_changes_its_arguments_changes_nothing_else(tmp_path):
    seen = []

    def spoiling(prompts, completions, completion_ids, tests, **_):
        for cases in tests:
            assert len(cases) == 2  # not spoiled by the completions before
            cases[0]["text"] = "spoiled"
            cases.pop()
        for messages in (*prompts, *completions):
            messages[0]["content"] = "spoiled"
            messages.clear()
        for ids in completion_ids:
            ids.clear()
        return [0.0] * 4

    def looking(prompts, completions, completion_ids, tests, **_):
        assert tests == [[{"text": "1"}, {"text": "2"}]] * 4
        seen.append([(p[0]["content"], c[0]["role"]) for p, c in zip(prompts, completions, strict=True)])
        assert all(completion_ids)
        return [0.0] * 4

    rows = [{**row, "tests": [{"text": "1"}, {"text": "2"}]} for row in chats()]
    unchanged = copy.deepcopy(rows)
    run = trainer(tmp_path, [spoiling, looking], train_dataset=rows)
    rollouts = generate(run, [rows[1]] * 4)
    before = [list(completion.token_ids) for completion in rollouts.completions]
    run.compute_rewards(rollouts)
    assert seen == [[("w1 w2", "assistant")] * 4]
    assert [completion.token_ids for completion in rollouts.completions] == before
    assert rows == unchanged


def test_a_batch_in_which_no_steps_are_found_has_no_rewards(tmp_path):
    def steps_of(found):
        def stepwise(completions, **_):
            return found

        return stepwise

    for found in ([[], [], [], []], [[], None, [], []]):
        run = trainer(tmp_path, steps_of(found), max_steps=1)
        _, advantages = first_batch(run)
        assert not advantages.any()
        run.train()
        assert "rewards/stepwise/mean" not in run.state.log_history[0]
    # Completions without steps are left out of the mean: (1 + 2) / 2.
    scored, _ = first_batch(trainer(tmp_path, steps_of([[(0, 1.0)], [], None, [(0, 2.0)]])))
    assert scored.metrics["rewards/stepwise/mean"].value() == 1.5


def test_names_come_from_functions_partials_and_objects(tmp_path):
    def named(**_):
        return [0.0] * 4

    class Judge:
        def __call__(self, **_):
            return [0.0] * 4

    run = trainer(tmp_path, [named, functools.partial(named), Judge(), functools.partial(Judge())])
    assert run.reward_func_names == ["named", "named_2", "Judge", "Judge_2"]


def reward_model(labels: int = 1) -> LlamaForSequenceClassification:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=labels,
        pad_token_id=0,
    )
    return LlamaForSequenceClassification(config)


def save_reward_model(path):
    reward_model().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def test_a_reward_model_scores_each_text_as_it_would_alone(tmp_path):
    judge = save_reward_model(tmp_path / "judge")
    functions = [judge]
    run = trainer(tmp_path, functions)
    rollout, model = generate(run, [run.train_dataset[0]] * 4), reward_model().eval()
    scored = run.compute_rewards(rollout)
    assert functions == [judge] and run.reward_func_names == ["judge"]
    for row in range(4):
        text = rollout.prompts[row] + rollout.texts[row]
        inputs = tokenizer()(text, return_tensors="pt")
        alone = model(**inputs).logits[0, 0].item()
        assert scored.rewards_NF[row, 0].item() == pytest.approx(alone, abs=1e-5)


def test_a_reward_model_as_a_module_takes_the_tokenizer_given_for_it(tmp_path):
    own = tokenizer()
    run = trainer(tmp_path, [reward_model(), lambda **_: [0.0] * 4], reward_processing_classes=[own, None])
    assert run.reward_processing_classes[0] is own
    assert first_batch(run)[0].rewards_NF.shape == (4, 2)


def test_a_reward_model_scores_chats_through_its_template(tmp_path):
    run = trainer(tmp_path, save_reward_model(tmp_path / "judge"), train_dataset=chats())
    assert not first_batch(run)[0].rewards_NF.isnan().any()


@pytest.mark.parametrize(
    ("rewards", "changes", "said"),
    [
        (None, {}, "reward_funcs is missing"),
        ([], {}, "reward_funcs is missing"),
        ([3], {}, "reward_funcs holds 3"),
        ([count_reward, count_reward], {"reward_weights": [1.0]}, "reward_weights has 1 entries for 2"),
        (
            [count_reward],
            {"reward_processing_classes": [None, None]},
            "reward_processing_classes has 2 entries for 1",
        ),
    ],
    ids=["none", "empty", "number", "weights", "tokenizers"],
)
def test_unusable_reward_arguments_are_refused_before_the_model_loads(tmp_path, rewards, changes, said):
    with pytest.raises(ConfigError, match=said):
        trainer(tmp_path, rewards, model="nowhere/at-all", **changes)


@pytest.mark.parametrize(
    "reward",
    [
        rewards.accuracy_reward,
        functools.partial(rewards.reasoning_accuracy_reward, reasoning_delimiters=["</r>"]),
        rewards.get_cosine_scaled_reward(max_len=9),
    ],
    ids=["function", "partial", "object"],
)
def test_the_missing_package_of_a_reward_is_named_before_the_model_loads(tmp_path, monkeypatch, reward):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    said = r"_reward needs math-verify, .* run pip install 'groupwise\[rewards\]'"
    with pytest.raises(ConfigError, match=said):
        trainer(tmp_path, [count_reward, reward], model="nowhere/at-all")


def test_one_tokenizer_for_several_reward_models_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"reward_processing_classes is one \w+ for 2 reward models; give a list"
    ):
        trainer(tmp_path, [reward_model(), count_reward, "judge"], reward_processing_classes=tokenizer())
    # Functions take no tokenizer: that of the only model is meant.
    own = tokenizer()
    run = trainer(tmp_path, [count_reward, reward_model()], reward_processing_classes=own)
    assert run.reward_processing_classes == [None, own]


def test_a_reward_model_with_two_labels_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="2 labels"):
        trainer(tmp_path, reward_model(labels=2), reward_processing_classes=tokenizer())


def test_the_callers_objects_stay_as_they_were(tmp_path):
    dataset, functions = prompts(), [lambda **_: [1.0, 2.0, 3.0, 4.0]]
    kwargs = {"dtype": "float32"}
    saved = tmp_path / "policy"
    policy().save_pretrained(saved)
    tokenizer().save_pretrained(saved)
    run = trainer(
        tmp_path, functions, model=str(saved), train_dataset=dataset, model_init_kwargs=kwargs, max_steps=1
    )
    run.train()
    assert kwargs == {"dtype": "float32"} and len(functions) == 1
    assert dataset.to_dict() == prompts().to_dict()


# One event loop per trainer.


class Answers(BaseHTTPRequestHandler):
    """A judge behind HTTP/1.1, whose connections stay open; replies to OpenAI's clients too."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "0.5"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge"}
        body = json.dumps({**head, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def judge():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def asks_httpx(url):
    client = pytest.importorskip("httpx").AsyncClient(trust_env=False)

    async def ask(text):
        return (await client.post(url, json={"text": text})).json()["choices"][0]["message"]["content"]

    return ask


def asks_openai(url):
    http = pytest.importorskip("httpx").AsyncClient(trust_env=False)
    client = pytest.importorskip("openai").AsyncOpenAI(
        base_url=url, api_key="none", http_client=http, max_retries=0
    )

    async def ask(text):
        given = [{"role": "user", "content": text or "-"}]
        answer = await client.chat.completions.create(model="judge", messages=given)
        return answer.choices[0].message.content

    return ask


def asks_aiohttp(url):
    aiohttp, sessions = pytest.importorskip("aiohttp"), []

    async def ask(text):
        if not sessions:
            sessions.append(aiohttp.ClientSession())
        async with sessions[0].post(url, json={"text": text}) as response:
            return (await response.json())["choices"][0]["message"]["content"]

    return ask


def asks_a_worker(url):
    """A queue and the task that serves it, both made by the first call."""
    made = []

    async def work(queue):
        while True:
            (await queue.get()).set_result("0.5")

    async def ask(text):
        if not made:
            queue = asyncio.Queue()
            made.extend([queue, asyncio.create_task(work(queue))])
        reply = asyncio.get_running_loop().create_future()
        made[0].put_nowait(reply)
        return await asyncio.wait_for(reply, 20)

    return ask


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("asks", "timeout"),
    [(asks_httpx, None), (asks_openai, 60.0), (asks_aiohttp, 60.0), (asks_a_worker, None)],
)
def test_a_client_serves_all_rewards_of_all_steps(tmp_path, judge, asks, timeout):
    """Two rewards share it and a semaphore of one slot; one of them also scores an evaluation."""
    ask, slot, calls = asks(judge), asyncio.Semaphore(1), []

    async def first(completions, trainer_state, **_):
        calls.append(trainer_state.global_step)
        async with slot:
            return [float(await ask(text)) for text in completions]

    async def second(completions, **_):
        async with slot:
            return [float(len(text) % 3) + float(await ask(text)) for text in completions]

    run = make_trainer(
        tmp_path,
        reward_funcs=[first, second],
        max_steps=3,
        save_strategy="no",
        reward_timeout=timeout,
    )
    assert run.evaluate()["eval_rewards/first/mean"] == 0.5
    run.train()
    assert calls[-3:] == [0, 1, 2]
    assert [log["rewards/first/mean"] for log in run.state.log_history if "loss" in log] == [0.5] * 3


def test_the_event_loop_ends_with_its_trainer(tmp_path):
    ended = threading.Event()

    async def forever():
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    tasks = []

    async def reward(completions, **_):
        tasks.append(asyncio.create_task(forever()))
        return [float(len(text)) for text in completions]

    run = make_trainer(tmp_path, reward_funcs=reward, max_steps=1, save_strategy="no")
    run.train()
    assert not ended.is_set()
    del run
    gc.collect()
    assert ended.wait(20)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="POSIX timers")
def test_a_reward_may_limit_its_own_time_within_reward_timeout(tmp_path):
    """As math-verify does, by ``signal.alarm``: its handler runs in the main thread."""

    class TooLong(Exception):
        pass

    def expire(*_):
        raise TooLong

    def limited(completions, **_):
        previous = signal.signal(signal.SIGALRM, expire)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            time.sleep(60)
        except TooLong:
            return [float(len(text)) for text in completions]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    run = make_trainer(tmp_path, reward_funcs=limited, max_steps=1, save_strategy="no", reward_timeout=60.0)
    run.train()
    assert run.state.log_history[0]["rewards/limited/mean"] > 0
