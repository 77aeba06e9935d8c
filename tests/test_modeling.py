"""The models against transformers' BERT, and what they promise beyond it."""

import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, BertModel, Trainer, TrainingArguments

from hf_minbert import MinBertForMaskedLM, MinBertForMultiTask, MinBertModel, get_tasks

BOTH = pytest.mark.parametrize("attention", ["eager", "sdpa"])
LENGTHS = (12, 7, 3)


def batch(vocabulary=80, lengths=LENGTHS):
    """Random words, padded to the longest, in two segments."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    segments = (torch.arange(max(lengths)) >= 2).long().expand_as(ids)
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": segments * mask}


def on_the_same_weights(reference, model):
    """The library's model with ours' weights, in the same memory: the library leaves its own in the mapped file, where
    MKL takes other kernels."""
    reference.load_state_dict(model.state_dict(), assign=True)
    return reference.eval()


@BOTH
@torch.no_grad()
def test_encoder_equals_transformers_bert(minilm, attention):
    model = MinBertModel.from_pretrained(minilm, attn_implementation=attention)
    reference = BertModel.from_pretrained(minilm, attn_implementation=attention)
    loaded = {name: value.clone() for name, value in reference.state_dict().items()}
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    on_the_same_weights(reference, model)
    inputs = batch(30522, (40, 17, 2))
    theirs, ours = (each(**inputs, output_hidden_states=True) for each in (reference, model))
    assert len(ours.hidden_states) == len(theirs.hidden_states) == 7
    pairs = list(zip(ours.hidden_states, theirs.hidden_states, strict=True))
    pairs += [(ours.last_hidden_state, theirs.last_hidden_state), (ours.pooler_output, theirs.pooler_output)]
    for a, b in pairs:
        # Eager does the reference's operations in the reference's order; a fused kernel owes the mathematics only.
        torch.testing.assert_close(a, b, rtol=0, atol=0 if attention == "eager" else 1e-5)


@torch.no_grad()
def test_fused_attention_equals_the_written_out_one(minilm):
    inputs = batch(30522, (40, 17, 2))
    reference = BertModel.from_pretrained(minilm, attn_implementation="eager")(**inputs)
    ours = MinBertModel.from_pretrained(minilm, attn_implementation="sdpa")(**inputs)
    tokens = inputs["attention_mask"] == 1
    torch.testing.assert_close(ours.last_hidden_state[tokens], reference.last_hidden_state[tokens], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.pooler_output, reference.pooler_output, rtol=0, atol=1e-5)


@BOTH
@torch.no_grad()
def test_padding_changes_nothing(minilm, attention):
    model = MinBertModel.from_pretrained(minilm, attn_implementation=attention)
    ids = torch.tensor([[101, 7592, 2088, 102, 0, 0, 0, 0], [101, 7592, 15756, 2897, 2005, 17953, 2361, 102]])
    padded = model(ids, attention_mask=(ids > 0).long())
    alone = model(ids[:1, :4])
    torch.testing.assert_close(padded.last_hidden_state[:1, :4], alone.last_hidden_state, rtol=0, atol=1e-5)
    torch.testing.assert_close(padded.pooler_output[:1], alone.pooler_output, rtol=0, atol=1e-5)


@BOTH
@torch.no_grad()
def test_word_logits_equal_transformers_bert(tmp_path, tiny_config, attention):
    config = {key: value for key, value in tiny_config().to_dict().items() if key in BertConfig.__annotations__}
    reference = BertForMaskedLM(BertConfig(**config)).eval()
    torch.nn.init.normal_(reference.cls.predictions.bias)
    reference.save_pretrained(tmp_path)
    model = MinBertForMaskedLM.from_pretrained(tmp_path, attn_implementation=attention)
    reference = on_the_same_weights(BertForMaskedLM.from_pretrained(tmp_path, attn_implementation=attention), model)
    inputs = batch()
    labels = torch.where(inputs["input_ids"] % 2 == 0, inputs["input_ids"], -100)
    theirs, ours = (each(**inputs, labels=labels) for each in (reference, model))
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=0 if attention == "eager" else 1e-5)
    torch.testing.assert_close(ours.loss, theirs.loss)


def places(labels, fillers=0):
    found = (labels != -100).flatten().nonzero()[:, 0]
    return torch.cat([found, torch.full((fillers,), labels.numel())])


@pytest.mark.parametrize("fillers", [0, 3])
def test_words_that_are_not_predicted_cost_no_logits_and_change_nothing(tiny_config, fillers):
    torch.manual_seed(0)
    model = MinBertForMaskedLM(tiny_config())
    inputs = batch()
    labels = torch.where(inputs["input_ids"] % 3 == 0, inputs["input_ids"], -100)
    labels[-1, -1] = 7  # the last place, which a filler reads
    gradients = []
    for options in ({}, {"predicted": places(labels, fillers)}):
        outputs = model(**inputs, labels=labels, **options)
        gradients.append((outputs.loss, *torch.autograd.grad(outputs.loss, [*model.parameters()])))
    assert outputs.logits.shape == ((labels != -100).sum() + fillers, model.config.vocab_size)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # a loss above 4 has steps of 5e-7


def test_without_labels_the_named_words_are_predicted(tiny_config):
    ids, model = torch.tensor([[2, 5, 3], [2, 6, 3]]), MinBertForMaskedLM(tiny_config()).eval()
    logits = model(ids, predicted=torch.tensor([4, 1])).logits
    torch.testing.assert_close(logits, model(ids).logits[[1, 0], 1])


@pytest.mark.parametrize("fillers", [None, 0, 2])
def test_no_word_to_predict_is_no_loss_and_no_gradient(tiny_config, fillers):
    model = MinBertForMaskedLM(tiny_config())
    inputs = batch()
    labels = torch.full_like(inputs["input_ids"], -100)
    loss = model(**inputs, labels=labels, predicted=None if fillers is None else places(labels, fillers)).loss
    loss.backward()
    assert loss == 0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


@BOTH
@torch.no_grad()
def test_embeddings_given_or_looked_up_are_the_same(tiny_model, attention):
    model = tiny_model(attn_implementation=attention).eval()
    inputs = batch()
    looked_up = model(**inputs, task="sst").logits
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert torch.equal(model(**inputs, task="sst").logits, looked_up)
    positions = torch.arange(max(LENGTHS))[None]
    assert torch.equal(model(**inputs, position_ids=positions, task="sst").logits, looked_up)
    assert not torch.equal(model(**inputs, position_ids=positions + 1, task="sst").logits, looked_up)


@pytest.mark.parametrize("given", [{}, {"input_ids": torch.ones(1, 2).long(), "inputs_embeds": torch.ones(1, 2, 32)}])
def test_exactly_one_kind_of_input(tiny_config, given):
    with pytest.raises(ValueError, match="either `input_ids` or `inputs_embeds`"):
        MinBertModel(tiny_config())(**given)


def test_an_input_longer_than_the_positions_is_refused(tiny_config):
    model = MinBertModel(tiny_config())
    assert model(torch.full((1, 64), 5)).last_hidden_state.shape == (1, 64, 32)
    with pytest.raises(ValueError, match="65.*64"):
        model(torch.full((1, 65), 5))
    with pytest.raises(ValueError, match="65.*64"):
        model(inputs_embeds=torch.zeros(1, 65, 32))


def test_heads_must_divide_the_hidden_size(tiny_config):
    with pytest.raises(ValueError, match="32 and 5"):
        MinBertModel(tiny_config(num_attention_heads=5))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_tokens_spoils_nothing(tiny_model, attention, dtype):
    model = tiny_model(attn_implementation=attention).to(dtype)
    inputs = batch(lengths=(6, 6))
    inputs["attention_mask"][1] = 0
    output = model(**inputs, task="sts", labels=torch.tensor([1.0, 2.0]), output_hidden_states=True)
    output.loss.backward()
    assert all(state.isfinite().all() for state in output.hidden_states)
    assert all(p.grad.isfinite().all() for p in model.bert.parameters())
    alone = model(**{key: value[:1] for key, value in inputs.items()}, task="sts", output_hidden_states=True)
    if dtype == torch.float32:
        torch.testing.assert_close(output.hidden_states[-1][:1], alone.hidden_states[-1], rtol=0, atol=1e-5)
        torch.testing.assert_close(output.logits[:1], alone.logits, rtol=0, atol=1e-5)
        inputs["attention_mask"][1] = 1
        # Added zeros change no bit where attention is written out; a fused kernel may take another path.
        atol = 0 if attention == "eager" else 1e-5
        torch.testing.assert_close(model(**inputs, task="sts").logits, output.logits, rtol=0, atol=atol)


@torch.no_grad()
def test_both_kinds_of_attention_agree_where_there_are_tokens(tiny_model):
    inputs = batch()
    inputs["attention_mask"][2] = 0
    eager, sdpa = (
        tiny_model(attn_implementation=kind).bert(**inputs).last_hidden_state[inputs["attention_mask"] == 1]
        for kind in ("eager", "sdpa")
    )
    torch.testing.assert_close(eager, sdpa, rtol=0, atol=1e-5)


@BOTH
@torch.no_grad()
def test_dropout_is_for_training_only(tiny_config, attention):
    model = MinBertModel(tiny_config(attention_probs_dropout_prob=0.5, attn_implementation=attention))
    inputs = batch()
    model.eval()
    assert torch.equal(model(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
    model.train()
    assert not torch.equal(model(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient(tiny_model, reentrant):
    inputs = {**batch(), "labels": torch.tensor([0, 4, 2])}
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        calls = []
        model.bert.encoder.layer[0].intermediate.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(**inputs, task="sst").loss.backward()
        assert len(calls) == 1 + checkpointing
        gradients.append([p.grad for p in model.bert.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@torch.no_grad()
def test_what_lies_inside_is_given_on_request(tiny_model, tiny_config):
    inputs = batch()
    for model, task in (
        (tiny_model(attn_implementation="eager"), {"task": "sst"}),
        (MinBertForMaskedLM(tiny_config(attn_implementation="eager")), {}),
        (MinBertModel(tiny_config(attn_implementation="eager")), {}),
    ):
        output = model(**inputs, **task, output_hidden_states=True, output_attentions=True)
        assert [state.shape for state in output.hidden_states] == [(3, 12, 32)] * 3
        assert [probabilities.shape for probabilities in output.attentions] == [(3, 2, 12, 12)] * 2
        torch.testing.assert_close(output.attentions[0].sum(-1), torch.ones(3, 2, 12))
        assert output.attentions[0][2, :, :, LENGTHS[2] :].max() == 0
        plain = model(**inputs, **task)
        assert plain.hidden_states is plain.attentions is None
        assert torch.equal(model(**inputs, **task, return_dict=False)[0], plain[0])


@pytest.mark.parametrize("padded", [True, False])
@torch.no_grad()
def test_the_encoder_compiles_to_one_graph(tiny_config, padded):
    model = MinBertModel(tiny_config()).eval()
    inputs = batch() if padded else {"input_ids": batch()["input_ids"]}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


@pytest.mark.parametrize("kind", [MinBertForMaskedLM, MinBertForMultiTask])
@pytest.mark.parametrize("asked", ["call", "config"])
def test_a_tuple_is_given_on_request(tiny_config, kind, asked):
    torch.manual_seed(0)
    model = kind(tiny_config(tasks=get_tasks(["sst"]))).eval()
    ids = torch.tensor([[2, 5, 3]])
    expected = model(ids).logits
    model.config.return_dict = asked == "call"
    (logits,) = model(ids, **({"return_dict": False} if asked == "call" else {}))
    assert torch.equal(logits, expected)


def test_a_compiled_model_trains(tiny_model):
    inputs = {**batch(), "labels": torch.tensor([0, 1, 1])}
    losses = []
    for wrap in (lambda model: model, lambda model: torch.compile(model, backend="eager")):
        model = tiny_model()
        loss = sum(wrap(model)(**inputs, task=task).loss for task in ("sst", "para"))
        loss.backward()
        losses.append((loss, model.bert.pooler.dense.weight.grad))
    torch.testing.assert_close(*losses)


# -- tasks -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_task_picks_the_head(tiny_model):
    model = tiny_model().eval()
    pooled = model.bert(**batch()).pooler_output
    for task, outputs in (("sst", 5), ("para", 1), ("sts", 1)):
        logits = model(**batch(), task=task).logits
        assert logits.shape == (3, outputs)
        assert torch.equal(logits, model.heads.get(task)(pooled[:, None]))


def test_a_loss_reaches_the_encoder_and_its_own_head_only(tiny_model):
    model = tiny_model()
    model(**batch(), task="para", labels=torch.tensor([0, 1, 1])).loss.backward()
    touched = {name.split(".")[1] for name, p in model.heads.named_parameters(prefix="heads") if p.grad is not None}
    assert touched == {"para"}
    assert all(p.grad is not None for p in model.bert.parameters())


def test_without_any_task_the_tasks_are_listed(tiny_model):
    with pytest.raises(ValueError, match="sst, para, sts"):
        tiny_model()(**batch())
    with pytest.raises(ValueError, match="'stss'.*sst, para, sts"):
        tiny_model()(**batch(), task="stss")
    with pytest.raises(ValueError, match="'stss'.*sst, para, sts"):
        tiny_model().set_active_task("stss")


def test_a_model_needs_a_task(tiny_config):
    with pytest.raises(ValueError, match="`tasks` is empty"):
        MinBertForMultiTask(tiny_config())


def test_a_config_edited_by_hand_is_put_in_order(tiny_config):
    config = tiny_config()
    config.tasks, config.active_task = get_tasks(["sst", "sts"]), "sts"
    model = MinBertForMultiTask(config)
    assert [task["name"] for task in model.config.tasks] == ["sst", "sts"]
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")


@torch.no_grad()
def test_the_active_task_answers_in_the_stock_form(tiny_model):
    model = tiny_model().eval()
    labels = torch.tensor([0, 1, 1])
    for task in ("sst", "para", "sts"):
        own = model(**batch(), task=task, labels=labels)
        model.set_active_task(task)
        stock = model(**batch(), labels=labels)
        assert stock.logits.shape == (3, model.config.num_labels)
        assert torch.equal(stock.loss, own.loss)
        if task == "para":
            z = own.logits[:, 0]
            torch.testing.assert_close(stock.logits.softmax(-1)[:, 1], z.sigmoid())
            torch.testing.assert_close(F.cross_entropy(stock.logits, labels), own.loss)
            assert torch.equal(stock.logits, torch.stack([torch.zeros(3), z], dim=1))
        else:
            assert torch.equal(stock.logits, own.logits)
    model.set_active_task(None)
    with pytest.raises(ValueError, match="Which task"):
        model(**batch())


@pytest.mark.parametrize("task", ["sst", "para", "sts"])
def test_the_stock_trainer_trains_an_active_task(tmp_path, tiny_model, task):
    model = tiny_model(active_task=task)
    before = {name: p.clone() for name, p in model.named_parameters()}
    labels = [1.5, 0.0, 4.0] if task == "sts" else [1, 0, 1]
    rows = [{key: value[i] for key, value in batch().items()} | {"labels": labels[i]} for i in range(3)]
    settings = {"max_steps": 1, "per_device_train_batch_size": 3, "learning_rate": 0.1, "report_to": "none"}
    args = TrainingArguments(tmp_path, **settings, use_cpu=True, optim="sgd", save_strategy="no", disable_tqdm=True)
    trainer = Trainer(model, args, train_dataset=rows)
    # True would mean that the Trainer leaves the division by the accumulation steps to us.
    assert trainer.model_accepts_loss_kwargs is False
    trainer.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert f"heads.{task}.linear.weight" in moved
    assert "bert.encoder.layer.0.attention.self.value.weight" in moved
    assert not any(name.startswith("heads.") and f".{task}." not in name for name in moved)


def test_low_rank_adapters_train_the_heads_too(tmp_path, tiny_model):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], modules_to_save=["heads"])
    inputs = batch()
    bare = tiny_model().eval()(**inputs, task="sst").logits
    model = peft.get_peft_model(tiny_model(), settings)
    torch.testing.assert_close(model.eval()(**inputs, task="sst").logits, bare)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # a fresh adapter's second half has a gradient only once the first has moved
        model(**inputs, task="sst", labels=torch.tensor([4, 0, 2])).loss.backward()
        optimizer.step()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert all("lora_" in name or "heads.modules_to_save" in name for name in trained)
    assert any("lora_A" in name for name in trained) and any("heads" in name for name in trained)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(tiny_model(), tmp_path).eval()
    tuned = model.eval()(**inputs, task="sst").logits
    assert not torch.allclose(tuned, bare)
    torch.testing.assert_close(again(**inputs, task="sst").logits, tuned)
