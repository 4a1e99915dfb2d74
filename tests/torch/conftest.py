import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Several threads would wait for each other in each small product when cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
