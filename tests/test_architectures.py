"""Every head with every pooling and encoding that it allows: trained, saved, loaded; and what tasks share."""

import itertools

import pytest
import torch
from transformers import AutoModel, BertModel

from hf_minbert import TASKS, MinBertForMultiTask, Predictor, get_tasks
from hf_minbert.data.collators import PaddedCollator
from hf_minbert.model.heads import HEADS
from hf_minbert.model.losses import LOSSES
from hf_minbert.model.pooling import JOINS, POOLINGS

#: Each kind of task, and for classes both one sentence and two.
ENCODINGS = {"sst": ["single"], "nli": ["cross", "bi"], "para": ["cross", "bi"], "sts": ["cross", "bi"]}
LABELS = {"sst": [4, 0, 2, 1], "nli": [2, 0, 1, 2], "para": [1, 0, 1, 1], "sts": [5.0, 0.0, 2.5, 1.25]}


def allowed() -> list[tuple[str, dict]]:
    """Each head with each encoding, pooling and join that it allows; then each layer mix, each loss, each mapping."""
    found = [
        (name, {"head": head, "pair_encoding": encoding})
        for name, encodings in ENCODINGS.items()
        for head, encoding in itertools.product(HEADS, encodings)
        if (encoding == "bi" and TASKS[name].kind != "classes") or not HEADS[head].compares
    ]
    found += [
        ("sts", {"pair_encoding": "bi", "head": head, "pooling": pooling})
        for head, pooling in itertools.product(HEADS, POOLINGS)
    ]
    for pooling, layers in itertools.product(POOLINGS, ("last", "mix")):
        if (pooling, layers) != ("pooler", "mix"):
            pooled = {"pooling": pooling, "layers": layers}
            found += [("sst", pooled), ("para", pooled), ("sts", {**pooled, "pair_encoding": "bi", "head": "cosine"})]
    found += [
        (name, {"pair_encoding": "bi", "join": join, "head": head, "sentence_dropout": 0.2})
        for name, join, head in itertools.product(("nli", "para"), JOINS, HEADS)
        if not HEADS[head].compares
    ]
    siamese = {"pair_encoding": "bi", "head": "cosine", "head_options": {"projection_size": 8}}
    found += [("para", {**siamese, "loss": loss}) for loss in LOSSES["binary"]]
    found += [("sts", {**siamese, "loss": loss}) for loss in LOSSES["score"]]
    found += [("sts", {**siamese, "head_options": {"mapping": mapping}}) for mapping in ("raw", "relu")]
    found.append(("sts", {"loss": "cosent"}))
    by_head = {"loss": "mnr", "loss_options": {"scores": "head", "bce_weight": 1}}
    found.append(("para", {"pair_encoding": "bi", "head": "mlp", **by_head}))
    return found


def batch(task, rows=4):
    """A random batch whose first row ends in padding."""
    torch.manual_seed(0)
    shape = (4, 2, 9) if task.pair_encoding == "bi" else (4, 9)
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, ..., 5:] = 0
    made = {
        "input_ids": torch.randint(5, 60, shape),
        "attention_mask": mask,
        "labels": torch.tensor(LABELS[task.name]),
    }
    return {"task": task.name, **{key: value[:rows] for key, value in made.items()}}


@pytest.mark.parametrize(("name", "fields"), allowed(), ids=str)
def test_it_trains_saves_and_loads(tiny_model, tmp_path, name, fields):
    (task,) = get_tasks({name: fields})
    model, given = tiny_model([task]), batch(task)
    # Adam makes whole steps of gradients that are nothing but rounding: a loss that fell may rise again.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, reached = [], set()
    for _ in range(5):
        torch.manual_seed(7)  # the same dropout each time: what lowers the loss is learning
        loss = model(**given).loss
        loss.backward()
        reached |= {key for key, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert min(losses) < losses[0]
    unused = set() if task.pooling == "pooler" else {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    if (task.head, task.loss) == ("cosine", "mnr"):  # which ranks, and never asks for the threshold
        unused |= {"heads.para.logit.weight", "heads.para.logit.bias"}
    assert {key for key, _ in model.named_parameters()} - reached == unused

    model.eval().save_pretrained(tmp_path)
    loaded = MinBertForMultiTask.from_pretrained(tmp_path)
    assert torch.equal(loaded(**given).logits, model(**given).logits)
    one = model(**batch(task, rows=1))
    torch.testing.assert_close(one.logits, model(**given).logits[:1], atol=1e-5, rtol=0)
    assert one.loss.isfinite()


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(("name", "encoding"), [("sst", "single"), ("sts", "cross"), ("sts", "bi")])
def test_padding_changes_no_result(tiny_model, name, encoding, pooling):
    (task,) = get_tasks({name: {"pooling": pooling, "pair_encoding": encoding}})
    model, collate = tiny_model([task]).eval(), PaddedCollator(task, pad_token_id=0)
    short, long = [2, 9, 8, 3], [2, *range(5, 30), 3]
    rows = [[short, long[:7]], [long, short]] if encoding == "bi" else [short, long]
    zeros = [[[0] * len(side) for side in ids] if encoding == "bi" else [0] * len(ids) for ids in rows]
    rows = [{"input_ids": ids, "token_type_ids": segments} for ids, segments in zip(rows, zeros, strict=True)]
    together = model(**collate(rows)).logits
    alone = torch.cat([model(**collate([row])).logits for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


# ---- Pairs that are encoded apart


@pytest.fixture
def bi(tiny_model):
    (task,) = get_tasks({"sts": {"pair_encoding": "bi", "pooling": "mean"}})
    model = tiny_model([task]).eval()

    def separately(input_ids, attention_mask):
        """The head on the vectors of two forward passes."""
        means = []
        for side in (0, 1):
            mask = attention_mask[:, side]
            states = model.bert(input_ids[:, side], mask).last_hidden_state * mask[..., None]
            means.append(states.sum(1) / mask.sum(1, keepdim=True))
        return model.heads.sts(torch.stack(means, dim=1))

    return task, model, separately


def test_one_forward_for_both_equals_two(bi):
    task, model, separately = bi
    given, shapes = batch(task), []
    hook = model.bert.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    logits = model(**given).logits
    hook.remove()
    assert shapes == [(2 * 4, 9)]
    expected = separately(given["input_ids"], given["attention_mask"])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


PAIRS, JOINED = torch.ones(3, 2, 7).long(), torch.tensor([[0, 1, 1]])


@pytest.mark.parametrize(
    ("encoding", "inputs", "said"),
    [
        ("bi", {"input_ids": torch.ones(3, 7).long()}, r"'sts' compares two sentences, .*no token with segment id 1"),
        (
            "bi",
            {"input_ids": torch.ones(3, 7).long(), "token_type_ids": torch.ones(7).long()},
            r"`token_type_ids` must be \[3, 7\], as its input. Found \[7\]",
        ),
        (
            "bi",
            {"input_ids": JOINED, "token_type_ids": JOINED, "position_ids": JOINED},
            r"`position_ids` must be \[1, 2, 3\], as its input. Found \[1, 3\]",
        ),
        ("bi", {"input_ids": PAIRS[:0, 0]}, r"'sts' encodes .* apart, .*: `input_ids` must be \[B, 2, T\]"),
        ("bi", {"input_ids": torch.ones(3, 3, 7).long()}, r"must be \[B, 2, T\]. Found \[3, 3, 7\]"),
        ("bi", {"inputs_embeds": torch.ones(3, 7, 32)}, r"`inputs_embeds` must be \[B, 2, T, H\]. Found \[3, 7, 32\]"),
        (
            "bi",
            {"input_ids": PAIRS, "attention_mask": torch.ones(3, 7)},
            r"`attention_mask` must be \[3, 2, 7\], as its",
        ),
        (
            "bi",
            {"input_ids": PAIRS, "token_type_ids": torch.zeros(3, 2, 6).long()},
            r"`token_type_ids` .* \[3, 2, 6\]",
        ),
        ("bi", {"input_ids": PAIRS[:0]}, r"`input_ids` holds no example. Found \[0, 2, 7\]"),
        ("cross", {"input_ids": PAIRS[:0, 0]}, r"`input_ids` holds no example. Found \[0, 7\]"),
        ("cross", {"input_ids": torch.ones(3, 2, 7).long()}, r"one input per example: `input_ids` must be \[B, T\]"),
    ],
)
def test_inputs_of_the_other_encoding_are_refused(tiny_model, encoding, inputs, said):
    with pytest.raises(ValueError, match=said):
        tiny_model(get_tasks({"sts": {"pair_encoding": encoding}}))(**inputs)


PAIR_TEXTS = ["a good film", "bad", "why is it not good , and how ?"], ["the man plays a dog", "why is it", ""]


def joined_and_apart(tokenizer, side="right"):
    """The same pairs as joined inputs, padded on this side, and as two inputs each."""
    joined = tokenizer(*PAIR_TEXTS, padding=True, padding_side=side, return_tensors="pt")
    both = [text for pair in zip(*PAIR_TEXTS, strict=True) for text in pair]
    apart = tokenizer(both, padding=True, return_tensors="pt")
    return dict(joined), {name: given.unflatten(0, (-1, 2)) for name, given in apart.items()}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["nli", "para", "sts"])
def test_a_joined_pair_is_taken_apart(tiny_model, tiny_tokenizer, name, pooling, side):
    fields = {"pair_encoding": "bi", "pooling": pooling}
    model = tiny_model(get_tasks({"sst": None, name: fields}), private_layers=1).eval()
    joined, apart = joined_and_apart(tiny_tokenizer, side)
    for task in ({"task": name}, {}):
        model.set_active_task(name if not task else "sst")
        torch.testing.assert_close(model(**joined, **task).logits, model(**apart, **task).logits, atol=1e-5, rtol=0)


def test_what_a_joined_pair_becomes_is_what_the_tokenizer_makes_of_each(tiny_model, tiny_tokenizer):
    (task,) = get_tasks({"sts": {"pair_encoding": "bi"}})
    model, given = tiny_model([task]), []
    model.bert.register_forward_pre_hook(lambda module, args, kwargs: given.append(kwargs), with_kwargs=True)
    for side in ("right", "left"):
        joined, apart = joined_and_apart(tiny_tokenizer, side)
        model(**joined)
        assert not given[-1]["token_type_ids"].any()
        mask = given[-1]["attention_mask"]
        assert torch.equal(mask, apart["attention_mask"].flatten(0, 1))
        assert torch.equal(given[-1]["input_ids"] * mask, apart["input_ids"].flatten(0, 1))
    one = tiny_tokenizer("a good film", "bad", return_tensors="pt")
    del one["attention_mask"]
    model(**one)
    assert given[-1]["input_ids"].tolist()[1][:3] == tiny_tokenizer("bad")["input_ids"]


def test_joined_pairs_train_as_pairs_apart_do(tiny_model, tiny_tokenizer):
    (task,) = get_tasks({"sts": {"pair_encoding": "bi", "pooling": "mean", "head": "cosine"}})
    model, labels = tiny_model([task]), torch.tensor([1.0, 2.0, 5.0])
    gradients = []
    for given in joined_and_apart(tiny_tokenizer):
        model.zero_grad()
        model(**given, labels=labels).loss.backward()
        gradients.append(model.bert.encoder.layer[0].intermediate.dense.weight.grad)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=0)
    assert gradients[0].any()


def test_embeddings_in_place_of_ids(bi):
    task, model, _ = bi
    given = batch(task)
    embeds = model.get_input_embeddings()(given["input_ids"])
    torch.testing.assert_close(
        model(task="sts", inputs_embeds=embeds, attention_mask=given["attention_mask"]).logits, model(**given).logits
    )


def test_hidden_states_are_given_when_asked_for_and_only_then(tiny_model):
    (task,) = get_tasks({"sst": {"pooling": "mean", "layers": "mix"}})
    model = tiny_model([task])
    assert model(**batch(task)).hidden_states is None
    assert len(model(**batch(task), output_hidden_states=True).hidden_states) == 3


def test_a_saved_bi_encoder_answers_sentences(tiny_model, tiny_tokenizer, tmp_path):
    (task,) = get_tasks({"sts": {"pair_encoding": "bi", "pooling": "mean", "head": "cosine"}})
    tiny_model([task]).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    predictor = Predictor.from_pretrained(tmp_path, batch_size=2)
    firsts, seconds = ["a good film", "bad", "why is it"], ["a good film", "the man plays a very good dog", "why"]
    answers = [answer["prediction"] for answer in predictor("sts", firsts, seconds)]
    assert answers[0] == pytest.approx(5.0, abs=1e-5)  # a sentence beside itself
    swapped = [answer["prediction"] for answer in predictor("sts", seconds, firsts)]
    assert answers == pytest.approx(swapped, abs=1e-5)  # a cosine knows no order


# ---- Private layers and encoders


def names_with_gradients(model, task, **given):
    model.zero_grad()
    model(**batch(get_tasks([task])[0]), **given).loss.backward()
    return {name for name, p in model.named_parameters() if p.grad is not None}


def test_private_layers_start_as_copies_of_the_checkpoint(tiny_bert):
    shared = MinBertForMultiTask.from_pretrained(tiny_bert, tasks=get_tasks(["sst", "para", "sts"]))
    model = MinBertForMultiTask.from_pretrained(tiny_bert, tasks=get_tasks(["sst", "para", "sts"]), private_layers=1)
    bert = BertModel.from_pretrained(tiny_bert).state_dict()
    for task in ("para", "sts"):
        for name, parameter in model.bert.encoder.private.get(task).named_parameters():
            assert torch.equal(parameter, bert[f"encoder.layer.{name}"]), name
        given = batch(get_tasks([task])[0])
        model.heads.load_state_dict(shared.heads.state_dict())
        assert torch.equal(model(**given).logits, shared(**given).logits)


def test_private_layers_of_a_fresh_model_start_alike(tiny_model):
    model = tiny_model(private_layers=2)
    first = dict(model.bert.encoder.layer.named_parameters())
    assert model.config.private_owner == "sst"
    for name, parameter in model.bert.encoder.private.get("sts").named_parameters():
        assert torch.equal(parameter, first[name])


def test_each_task_trains_its_own_layers_and_the_shared_ones(tiny_model):
    model = tiny_model(private_layers=1)
    reached = {task: names_with_gradients(model, task) for task in ("sst", "para", "sts")}
    own = {"sst": "bert.encoder.layer.1.", "para": "bert.encoder.private.para.", "sts": "bert.encoder.private.sts."}
    for task in reached:
        others = set.union(*(names for other, names in reached.items() if other != task))
        assert {name for name in reached[task] if name not in others} == {
            name for name, _ in model.named_parameters() if name.startswith((own[task], f"heads.{task}."))
        }
    assert any(name.startswith("bert.encoder.layer.0.") for name in set.intersection(*reached.values()))


@pytest.fixture(params=[{"private_layers": 1}, {"private_encoders": True}], ids=str)
def saved_private(request, tiny_model, tmp_path):
    """A saved model of sst, para and sts in which no two private weights are equal."""
    model = tiny_model(**request.param).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_what_is_private_survives_the_file(saved_private):
    model, folder = saved_private
    loaded, report = MinBertForMultiTask.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    states = []
    for task in get_tasks(["sst", "para", "sts"]):
        given = batch(task)
        assert torch.equal(loaded(**given).logits, model(**given).logits)
        states.append(model.encoder_of(task.name)(given["input_ids"], task=task.name).last_hidden_state)
    assert not torch.equal(states[1], states[2])


@pytest.mark.parametrize(
    "tasks",
    [("para", "sts", "sst"), ("sts", "sst"), ("para", "sst"), ("sst",), ("cfimdb", "para", "sst")],
    ids=" ".join,
)
def test_what_is_private_stays_its_tasks_under_other_tasks(saved_private, tasks):
    model, folder = saved_private
    loaded = MinBertForMultiTask.from_pretrained(folder, tasks=get_tasks(tasks))
    for task in get_tasks([name for name in tasks if name in model.config.task_names]):
        assert torch.equal(loaded(**batch(task)).logits, model(**batch(task)).logits)
    if "cfimdb" in tasks:  # new there: it begins as the owner
        ids = torch.tensor([[2, 9, 8, 3]])
        new, owner = (loaded.encoder_of(name)(ids, task=name).last_hidden_state for name in ("cfimdb", "sst"))
        assert torch.equal(new, owner)


def test_without_the_owner_of_the_encoders_own_layers_it_is_refused(saved_private):
    _, folder = saved_private
    with pytest.raises(ValueError, match="`tasks` must keep 'sst', whose private layers .* Found para, sts"):
        MinBertForMultiTask.from_pretrained(folder, tasks=get_tasks(["para", "sts"]))


def test_a_saved_order_survives_two_files(saved_private, tmp_path):
    """Its owner is not the first task any more, and stays the owner."""
    model, folder = saved_private
    MinBertForMultiTask.from_pretrained(folder, tasks=get_tasks(["para", "sst", "sts"])).save_pretrained(folder)
    loaded = MinBertForMultiTask.from_pretrained(folder)
    assert loaded.config.private_owner == "sst"
    for task in get_tasks(["sst", "para", "sts"]):
        assert torch.equal(loaded(**batch(task)).logits, model(**batch(task)).logits)


def test_more_private_layers_change_no_answer_and_fewer_are_refused(tiny_model, tmp_path):
    model = tiny_model(private_layers=1).eval()
    for task in ("para", "sts"):
        model.bert.encoder.private.get(task)["1"].output.dense.bias.data += 1
    model.save_pretrained(tmp_path)
    loaded = MinBertForMultiTask.from_pretrained(tmp_path, private_layers=2)
    for task in get_tasks(["sst", "para", "sts"]):
        assert torch.equal(loaded(**batch(task)).logits, model(**batch(task)).logits)
    with pytest.raises(ValueError, match="`private_layers` must be at least 1.*Found 0"):
        MinBertForMultiTask.from_pretrained(tmp_path, private_layers=0)
    with pytest.raises(ValueError, match="`private_encoders` must stay False"):
        MinBertForMultiTask.from_pretrained(tmp_path, private_layers=1, private_encoders=True)


def test_the_encoder_of_one_task_loads_by_itself(tiny_model, tmp_path):
    model = tiny_model(private_layers=1).eval()
    model.bert.encoder.private.get("sts")["1"].output.dense.bias.data += 1
    model.save_pretrained(tmp_path)
    encoder, ids = AutoModel.from_pretrained(tmp_path), torch.tensor([[2, 9, 8, 3]])
    for task in ("sst", "sts"):
        expected = model.bert(ids, task=task).last_hidden_state
        assert torch.equal(encoder(ids, task=task).last_hidden_state, expected)
    assert not torch.equal(encoder(ids, task="sts").last_hidden_state, encoder(ids).last_hidden_state)


def test_private_encoders_share_nothing(tiny_model):
    model = tiny_model(private_encoders=True)
    reached = [names_with_gradients(model, task) for task in ("sst", "para", "sts")]
    assert not any(a & b for a, b in itertools.combinations(reached, 2))
    assert set.union(*reached) == {name for name, _ in model.named_parameters()}


def test_hidden_states_are_those_of_the_tasks_own_layers(tiny_model):
    model = tiny_model(private_layers=1).eval()
    model.bert.encoder.private.get("sts")["1"].output.dense.bias.data += 1
    given = batch(get_tasks(["sts"])[0])
    output = model(**given, output_hidden_states=True)
    expected = model.bert(given["input_ids"], given["attention_mask"], task="sts").last_hidden_state
    assert len(output.hidden_states) == 3 and torch.equal(output.hidden_states[-1], expected)
