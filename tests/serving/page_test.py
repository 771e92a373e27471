"""The page in a headless Chromium, with typed questions. Skipped without Chromium, its driver or selenium."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.servers import Running, running

webdriver: Any = pytest.importorskip("selenium.webdriver", reason="selenium is missing: pip install selenium")
exceptions: Any = pytest.importorskip("selenium.common.exceptions")
support: Any = pytest.importorskip("selenium.webdriver.support.ui")
By, Keys = webdriver.common.by.By, webdriver.common.keys.Keys
Select, WebDriverWait = support.Select, support.WebDriverWait
CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium or chromedriver is missing"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,900"):
        options.add_argument(argument)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")  # no network
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any, server: Running) -> Any:
    """The page, opened again without a history."""
    browser.get(f"http://127.0.0.1:{server.port}/")
    browser.execute_script("localStorage.clear(); sessionStorage.clear()")
    browser.get(f"http://127.0.0.1:{server.port}/")
    until(browser, lambda: Select(find(browser, "#model")).options)
    return browser


def until(browser: Any, condition: Callable[[], Any]) -> Any:
    """Wait until a condition holds. An element may be replaced between the search for it and its use."""
    return WebDriverWait(browser, 30, ignored_exceptions=[exceptions.StaleElementReferenceException]).until(
        lambda _: condition()
    )


def find(browser: Any, selector: str) -> Any:
    return browser.find_element(By.CSS_SELECTOR, selector)


def texts(browser: Any, selector: str) -> list[str]:
    return [element.text for element in browser.find_elements(By.CSS_SELECTOR, selector)]


def ask(browser: Any, question: str, key: str = Keys.ENTER) -> None:
    """Type a question, and wait for its answer."""
    field = find(browser, "#question")
    field.clear()
    field.send_keys(question, key)
    until(browser, lambda: browser.title.startswith(question) and " ms" in find(browser, "#state").text)


def test_a_question_marks_words_and_shows_scores_and_winners(page: Any, server: Running) -> None:
    ask(page, "silver castle bridges")
    _, answer = server.ask("/search", {"queries": ["silver castle bridges"], "k": 10, "model": "mlr"})
    hits = answer["results"][0]
    assert texts(page, "li h3") == [hit["title"] for hit in hits]
    assert texts(page, "li .facts b") == [f"{hit['score']:.4f}" for hit in hits]
    assert texts(page, "li .chip") == [hit["winners"][0] for hit in hits]
    marked = {text.lower() for text in texts(page, "mark")}
    assert "bridge" in marked
    assert marked <= {"silver", "castle", "bridge", "bridges"}, "no other word is marked"
    assert "proven" in find(page, "section > p").text
    assert "120 passages" in find(page, "#state").text
    assert find(page, "#count").get_attribute("max") == "1000"


def test_passage_texts_are_escaped(page: Any) -> None:
    """Markup in a passage is shown as text; none of it runs, and the console has no error."""
    find(page, "#count").clear()
    find(page, "#count").send_keys("100")
    ask(page, "silver castle bridge")
    Select(find(page, "#model")).select_by_visible_text("dual")
    until(page, lambda: texts(page, "section h2") == ["dual"])
    assert page.find_elements(By.CSS_SELECTOR, "li img, li u") == []
    assert "<u>title</u> <img src=x onerror=alert(1)>" in texts(page, "li h3")
    assert any("<img src=x onerror=alert(1)>" in text for text in texts(page, "li .text"))
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_the_why_button_opens_the_explanation(page: Any) -> None:
    ask(page, "river stone")
    find(page, "li button").click()
    until(page, lambda: "the score is the product with layer" in find(page, "li pre").text)
    find(page, "li button").click()
    assert texts(page, "li pre") == []


def test_filters_two_runs_and_the_link(page: Any, server: Running) -> None:
    ask(page, "paper light")
    select = find(page, "#fields select")
    assert select.get_attribute("data-field") == "colour"
    Select(select).select_by_value("red")
    until(page, lambda: "filter=" in page.current_url)
    Select(find(page, "#beside")).select_by_visible_text("late")
    until(page, lambda: texts(page, "section h2") == ["mlr", "late"])
    left, right = page.find_elements(By.CSS_SELECTOR, "section")
    assert left.location["y"] == right.location["y"], "the models are next to each other"
    assert any(" → " in text for text in texts(page, "section:last-child .chip")), "the tokens that won are shown"
    assert texts(page, "li .only"), "passages that only one model has are marked"
    shown = texts(page, "li h3")
    _, answer = server.ask("/search", {"queries": ["paper light"], "filter": {"colour": "red"}, "model": "mlr"})
    assert shown[:10] == [hit["title"] for hit in answer["results"][0]]
    link = page.current_url
    page.get("about:blank")
    page.get(link)
    until(page, lambda: texts(page, "li h3") == shown)
    assert find(page, "#question").get_attribute("value") == "paper light"
    page.set_window_size(400, 800)
    left, right = page.find_elements(By.CSS_SELECTOR, "section")
    assert left.location["y"] < right.location["y"], "on a phone, the models are below each other"
    for width in (400, 320):
        page.set_window_size(width, 800)
        assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"), width
    page.set_window_size(1200, 900)


@pytest.mark.parametrize(
    ("query", "absent"),
    [
        ("q=river&run=gone", "the run gone"),
        ("q=river&beside=gone", "the run gone"),
        ("q=river&filter=%5B%22colour%22%2C%22purple%22%5D", "the filter colour: purple"),
        ("q=river&filter=%5B%22size%22%2C%22big%22%5D", "the filter size: big"),
    ],
)
def test_a_link_to_what_is_gone_answers_no_other_question(page: Any, server: Running, query: str, absent: str) -> None:
    page.get(f"http://127.0.0.1:{server.port}/?{query}")
    until(page, lambda: f"This link needs {absent}, which is not here" in find(page, "#state").text)
    assert not texts(page, "li h3")
    assert find(page, "#question").get_attribute("value") == "river"


def test_the_history_by_keyboard(page: Any) -> None:
    for question in ("first river", "second stone", "third music"):
        ask(page, question)
    field = find(page, "#question")
    field.send_keys(Keys.ESCAPE, Keys.ARROW_UP)
    assert field.get_attribute("value") == "third music"
    field.send_keys(Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_UP)
    assert field.get_attribute("value") == "first river"
    field.send_keys(Keys.ARROW_DOWN)
    assert field.get_attribute("value") == "second stone"
    field.send_keys(Keys.ENTER)
    until(page, lambda: page.title.startswith("second stone"))
    page.execute_script("document.activeElement.blur()")
    page.switch_to.active_element.send_keys("/")
    assert page.switch_to.active_element.get_attribute("id") == "question"
    page.back()
    until(page, lambda: page.title.startswith("third music"))


def test_an_error_is_shown_in_a_sentence(page: Any) -> None:
    field = find(page, "#question")
    field.send_keys(Keys.ENTER)
    assert find(page, "#state").text == "Write a question."
    page.execute_script("const run = document.getElementById('model'); run.add(new Option('gone')); run.value = 'gone'")
    field.send_keys("river", Keys.ENTER)
    until(page, lambda: "there is no model 'gone'; there are mlr" in find(page, "#state").text)


def test_the_page_loads_nothing_from_other_hosts(page: Any, server: Running) -> None:
    ask(page, "winter")
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    addresses = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    own = (f"http://127.0.0.1:{server.port}/", "data:", "about:", "chrome:")
    assert [address for address in addresses if not address.startswith(own)] == []
    assert len(addresses) > 2, "control: the requests were recorded"


@pytest.mark.exhaustive
def test_the_page_asks_for_the_token(browser: Any, runs: Path, tmp_path: Path) -> None:
    with running(tmp_path / "stderr", str(runs / "dual"), "--batch=1", JAXRET_TOKEN="sesame") as server:
        browser.get(f"http://127.0.0.1:{server.port}/?q=winter")
        until(browser, lambda: find(browser, "#token").is_displayed())
        assert "needs its token" in find(browser, "#state").text
        find(browser, "#token").send_keys("sesame", Keys.TAB)
        until(browser, lambda: texts(browser, "li h3"))
        assert "sesame" not in browser.current_url
