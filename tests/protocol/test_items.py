from isthmus.protocol import RunSpec, items


def drawn(spec: RunSpec) -> str:
    letter = {"train": "t", "eval": "e", "save": "s"}
    return " ".join(f"{letter[item.kind]}{item.step}" for item in items(spec))


def spec(**fields: int) -> RunSpec:
    return RunSpec(**{"steps": 3, "micro_batches": 4, "micro_batch_size": 2, **fields})


def test_a_run_ends_with_a_checkpoint():
    assert drawn(spec()) == "t0 t1 t2 s3"


def test_evaluations_and_checkpoints_come_every_so_many_steps_and_at_the_end():
    assert drawn(spec(steps=5, eval_every=2, eval_micro_batches=1, save_every=3)) == "t0 t1 e2 t2 s3 t3 e4 t4 e5 s5"


def test_a_resumed_run_keeps_its_step_numbers_and_samples():
    assert drawn(spec(start_step=2)) == "t2 s3"
    assert next(items(spec(start_step=2))).first_sample == 2 * 4 * 2


def test_a_long_evaluation_is_split_so_that_no_item_outgrows_a_training_step():
    evaluation = [item for item in items(spec(steps=1, eval_every=1, eval_micro_batches=9)) if item.kind == "eval"]
    assert [item.micro_batches for item in evaluation] == [4, 4, 1]
    assert [item.first_sample for item in evaluation] == [0, 8, 16]


def test_indices_count_up_from_zero():
    sequence = list(items(spec(steps=5, eval_every=2, eval_micro_batches=9, save_every=3)))
    assert [item.index for item in sequence] == list(range(len(sequence)))
