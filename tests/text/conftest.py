import pytest
from text_data import KINDS, load_tokenizer


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return load_tokenizer(request.param)
