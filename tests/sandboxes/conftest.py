import asyncio
import inspect
import os

import pytest
from sandbox_making import BACKENDS, Mark, children, maker, usable


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run coroutine tests, each in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(params=BACKENDS)
def backend(request):
    return usable(request.param)


@pytest.fixture(params=["bubblewrap", "bubblewrap-userns"])
def bubblewrap(request):
    return usable(request.param)


@pytest.fixture
def create(backend, tmp_path):
    """Makes a sandbox of the backend under test and destroys it at the end of the block."""
    return maker(backend, tmp_path)


@pytest.fixture
def mark():
    return Mark()


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No test leaves a child process or a descriptor behind."""
    before, fds = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert children() <= before
    assert len(os.listdir("/proc/self/fd")) <= fds
