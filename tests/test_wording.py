"""Numbers in sentences."""

import pytest

from hf_minbert.settings.wording import counted


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 rows are"), (1, "1 row is"), (2, "2 rows are"), (1234, "1,234 rows are")]
)
def test_a_number_has_its_noun_and_its_verb(count, said):
    assert counted(count, "row", "is", "are") == said
    assert counted(count, "row") == said.rsplit(" ", 1)[0]
