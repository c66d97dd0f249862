"""What pytest-xdist's processes tell each other of a test arrives, whatever the test says."""

from __future__ import annotations

import execnet
import pytest


def test_a_report_with_what_execnet_cannot_send_arrives(pytestconfig: pytest.Config) -> None:
    report = pytest.TestReport(
        "test_x.py::test_\udc80", ("test_x.py", 1, "test"), {}, "failed", "not \udc80", "call",
        sections=[("stdout", "\udc80")], user_properties=[("places", {"\udc80": (object, 1 << 80)})],
    )  # fmt: skip
    data = pytestconfig.hook.pytest_report_to_serializable(config=pytestconfig, report=report)
    arrived = pytestconfig.hook.pytest_report_from_serializable(
        config=pytestconfig, data=execnet.loads(execnet.dumps(data))
    )
    assert (arrived.outcome, arrived.longrepr, arrived.sections) == ("failed", r"not \udc80", [("stdout", r"\udc80")])
    assert arrived.user_properties == [("places", {r"\udc80": ("<class 'object'>", 1 << 80)})]
