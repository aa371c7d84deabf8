"""A first chat with a real file: base models, long titles, the context, Continue, the settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.page import answers, ask, until, wait_answers
from helpers.running_server import RunningServer
from helpers.scripted_server import ScriptedServer
from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.message import ChatPrompt, TextPrompt

LONG = "a title that is much longer than the twenty-five letters that the list has room for"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A model without a chat template."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text((model_path() / "config.json").read_text())
    with ScriptedServer(folder=folder, defaults=SamplingParams(temperature=0.2)) as server:
        yield server


def until_known(tab: Any, temperature: str) -> None:
    """Wait until the page shows the model's default."""
    until(tab, f"document.getElementById('sampling-temperature').placeholder === '{temperature}'")


def test_a_long_title_leaves_its_buttons_in_view(tab: Any, scripted: ScriptedServer) -> None:
    tab.goto(scripted.url)
    ask(tab, LONG)
    wait_answers(tab, 1)
    tab.hover("#list li")
    frame = tab.locator("#sidebar").bounding_box()
    for name in ("Rename", "Delete"):
        button = tab.locator(f"#list li [aria-label^='{name}']").bounding_box()
        assert button["x"] >= frame["x"]
        assert button["x"] + button["width"] <= frame["x"] + frame["width"]
    tab.click("#list li [aria-label^='Delete']")  # Playwright clicks only what can be seen
    until(tab, "document.querySelectorAll('#list li').length === 0")


def test_a_base_model_completes_the_text(tab: Any, base: ScriptedServer) -> None:
    tab.goto(base.url)
    tab.wait_for_selector("text=scripted is a base model: it goes on with your text.")
    assert tab.get_attribute("#question", "placeholder") == "Text to go on with"
    ask(tab, "one two")
    wait_answers(tab, 1)
    assert answers(tab) == ["one two ."]
    message = base.received[-1]
    assert isinstance(message.prompt, TextPrompt)
    assert (message.prompt.text, message.sampling.max_tokens) == ("one two", 200)
    assert (message.sampling.logprobs, message.sampling.top_logprobs) == (True, 5)
    tab.click("[aria-label='Show the tokens']")
    assert tab.locator(".token").count() == 3
    ask(tab, " three")
    wait_answers(tab, 2)
    prompt = base.received[-1].prompt
    assert isinstance(prompt, TextPrompt)
    assert prompt.text == "one twoone two . three"  # all texts are one


def test_an_encoder_says_that_it_writes_nothing(tab: Any, base: ScriptedServer) -> None:
    def embedder(route: Any) -> None:
        models = (response := route.fetch()).json()
        models["data"][0]["capabilities"] = ["embedding"]
        route.fulfill(response=response, json=models)

    tab.route("**/v1/models", embedder)
    tab.goto(base.url)
    tab.wait_for_selector("text=scripted embeds texts or scores pairs, over HTTP.")
    assert not tab.query_selector_all("#suggestions button")


def test_trying_again_helps_where_a_chat_was_refused(tab: Any, base: ScriptedServer) -> None:
    """The error is of a page that did not yet know that the model is a base model."""
    tab.goto(base.url)
    tab.route(
        "**/v1/completions",
        lambda route: route.fulfill(status=400, json={"error": {"message": "no chat template"}}),
    )
    ask(tab, "one")
    tab.wait_for_selector(".note.error:has-text('no chat template')")
    tab.unroute("**/v1/completions")
    tab.click("text=Try again")
    tab.wait_for_selector("text=one .")


def test_the_settings_show_values(tab: Any, scripted: ScriptedServer, base: ScriptedServer) -> None:
    for server, temperature, most in ((scripted, "0.25", "no limit"), (base, "0.2", "200")):
        tab.goto(server.url)
        until(
            tab, f"document.getElementById('sampling-temperature').placeholder === '{temperature}'"
        )
        shown = tab.evaluate(
            "Object.fromEntries([...document.querySelectorAll('#sampling input')]"
            ".map((field) => [field.id.replace('sampling-', ''), field.placeholder]))"
        )
        assert shown == {
            "temperature": temperature, "top_p": "1", "top_k": "0", "min_p": "0",
            "max_tokens": most, "seed": "random", "presence_penalty": "0",
            "frequency_penalty": "0", "repetition_penalty": "1", "stop": "none",
        }  # fmt: skip


def test_thinking_is_offered_where_the_model_can(tab: Any, scripted: ScriptedServer) -> None:
    tab.goto(scripted.url)
    until_known(tab, "0.25")
    tab.click("#open-settings")
    assert not tab.is_visible("#set-thinking")
    with scripted.templated("{% if enable_thinking %}{% endif %}"):
        tab.reload()
        until_known(tab, "0.25")
        tab.click("#open-settings")
        tab.select_option("#set-thinking", "on")
        tab.click("#close-settings")
        ask(tab, "one")
        wait_answers(tab, 1)
        prompt = scripted.received[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.template_args == {"enable_thinking": True}
    tab.reload()  # the setting is kept, and not sent to a model without a switch
    until_known(tab, "0.25")
    ask(tab, "two")
    wait_answers(tab, 2)
    prompt = scripted.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_args == {}
    assert not tab.is_visible("#active")


def ask_for_one_token(tab: Any, url: str) -> None:
    """The answer is cut off."""
    tab.goto(url)
    tab.click("#open-settings")
    tab.fill("#sampling-max_tokens", "1")
    tab.press("#sampling-max_tokens", "Tab")
    tab.click("#close-settings")
    ask(tab, "one two")
    tab.wait_for_selector("text=The answer was cut off")


def test_continue_goes_on_with_an_answer_that_was_cut_off(
    tab: Any, scripted: ScriptedServer
) -> None:
    ask_for_one_token(tab, scripted.url)
    assert answers(tab) == ["one"]
    tab.click(".note >> text=Continue")
    until(tab, "document.querySelector('.markdown').innerText.trim() === 'one one .'")
    prompt = scripted.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_args == {"continue_final_message": True}
    assert [(turn["role"], turn["content"]) for turn in prompt.messages] == [
        ("user", "one two"),
        ("assistant", "one "),
    ]
    assert tab.locator("article.answer").count() == 1  # the same answer, no other version
    wait_answers(tab, 1)
    assert not tab.is_visible(".note")


def test_an_answer_that_fills_the_context_is_not_continued(
    tab: Any, scripted: ScriptedServer
) -> None:
    def small(route: Any) -> None:
        models = (response := route.fetch()).json()
        models["data"][0]["context_length"] = 3
        route.fulfill(response=response, json=models)

    tab.route("**/v1/models", small)
    ask_for_one_token(tab, scripted.url)
    assert tab.text_content("#meter").strip() == "3 of 3 tokens"
    assert tab.locator(".note >> text=Continue").count() == 0


def test_continue_after_a_stop(tab: Any, scripted: ScriptedServer) -> None:
    tab.goto(scripted.url)
    ask(tab, "!forever")
    until(tab, "document.querySelector('.markdown').innerText.includes('more more')")
    tab.keyboard.press("Escape")
    wait_answers(tab, 1)
    tab.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=400, json={"error": {"message": "the context is full"}}),
    )
    before = answers(tab)
    tab.click(".note >> text=Continue")
    tab.wait_for_selector(".toast:has-text('the context is full')")
    assert answers(tab) == before
    assert "You stopped this answer." in tab.text_content(".note")  # and Continue is there still


def test_the_meter_shows_the_context(tab: Any, builtin: RunningServer) -> None:
    tab.goto(builtin.url)
    assert not tab.is_visible("#meter")
    ask(tab, "What is 12 + 30?")
    until(tab, "!document.getElementById('meter').hidden")  # a moment after the answer
    text = tab.text_content("#meter").strip()
    used, most = (int(word.replace(",", "")) for word in text.split() if word[0].isdigit())
    assert text.endswith("tokens")
    assert 30 < used < 60 < most
    assert tab.get_attribute("#meter", "aria-valuenow") == str(used)
    tab.click("#new-chat")
    assert not tab.is_visible("#meter")


def test_the_meter_fits_a_phone(tab: Any, base: ScriptedServer) -> None:
    tab.set_viewport_size({"width": 360, "height": 640})
    tab.goto(base.url)
    ask(tab, "one two")
    wait_answers(tab, 1)
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
