"""The chat page in a real browser."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_support import Server
from serve_support import WAIT_S, Alone

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
SCREENSHOTS = os.environ.get("OFFLOAD_SCREENSHOTS")
"""A directory to leave pictures of the page in, for people."""
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
KEY = "only this"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cache = tmp_path_factory.mktemp("cache")
    with Server("--parallel", 2, "--api-key", KEY, cache=cache, key=KEY) as running:
        yield running


@pytest.fixture
def page(server: Server) -> Iterator[Any]:
    """An open page, and at its end: nothing was complained of or fetched from elsewhere."""
    complaints: list[str] = []

    def fetched(request: Any) -> None:
        if not request.url.startswith((server.url, "data:")):
            complaints.append(request.url)

    def complained(message: Any) -> None:
        # Browsers report every refusal, and looking at the figures without a key is one.
        if message.type == "error" and "401" not in message.text:
            complaints.append(message.text)

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            opened = browser.new_page(viewport={"width": 1200, "height": 760})
            opened.set_default_timeout(1000 * WAIT_S)
            expect.set_options(timeout=1000 * WAIT_S)
            opened.on("pageerror", lambda error: complaints.append(str(error)))
            opened.on("request", fetched)
            opened.on("console", complained)
            opened.goto(server.url)
            yield opened
        finally:
            browser.close()
    assert complaints == []


def picture(page: Any, name: str) -> None:
    if SCREENSHOTS is not None:
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png")


def give_key(page: Any) -> None:
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").press("Tab")
    page.get_by_text("ready", exact=True).wait_for()


def number(page: Any, at: str) -> int:
    return int(re.sub(r"\D", "", page.locator(at).inner_text()) or 0)


def test_a_conversation(page: Any, alone: Alone) -> None:
    page.get_by_text("an API key is needed").wait_for()
    give_key(page)
    assert page.locator("#model").inner_text() == "tiny_moe"
    assert "weights" in page.locator("#tiers").inner_text()
    before = number(page, "#tokens")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tokens at most").fill("120")
    page.get_by_label("Message").fill("What is a list?")
    page.get_by_label("Message").press("Enter")
    page.get_by_role("button", name="Stop").wait_for()
    # It is written while it comes: a part of it is there before all of it.
    expect(page.locator(".turn.model.busy .text")).to_have_text(re.compile(r"\S"))
    expect(page.locator("#rate")).to_have_text(re.compile("[1-9]"))
    picture(page, "streaming")
    page.get_by_text("first token after").wait_for()
    messages = [{"role": "user", "content": "What is a list?"}]
    answer = alone.answer(alone.chat_ids(messages), 120)
    assert page.locator(".turn.model .text").text_content() == answer
    expect(page.locator("#tokens")).to_have_text(f"{before + 120:,}")
    # The second question is asked after the first and its answer.
    page.get_by_label("Tokens at most").fill("8")
    page.get_by_label("Message").fill("Why?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn .note")).to_have_count(2)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]
    second = page.locator(".turn.model .text").nth(1).text_content()
    assert second == alone.answer(alone.chat_ids(messages), 8)
    picture(page, "answered")
    page.set_viewport_size({"width": 420, "height": 800})
    page.emulate_media(color_scheme="dark")
    picture(page, "narrow")


def test_stopping_and_errors(page: Any, server: Server) -> None:
    give_key(page)
    cancelled = server.stats()["requests"]["cancelled"]
    page.get_by_label("Message").fill("<b>What</b> is a list?")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".turn.model .text")).to_have_text(re.compile(r"\S"))
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped", exact=True).wait_for()
    server.until("cancelled", cancelled + 1)
    # What people write is text, not markup.
    assert page.locator(".turn.user .text").inner_text() == "<b>What</b> is a list?"
    page.get_by_label("API key").fill("wrong")
    page.get_by_label("Message").fill("Again?")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("alert").wait_for()
    assert "the API key is wrong" in page.get_by_role("alert").inner_text()
    picture(page, "error")
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
