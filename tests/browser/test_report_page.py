"""The page of `minbert report` in a real browser: every section is found, pictures load, a phone can show it."""

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from hf_minbert.reporting import plots  # noqa: E402
from hf_minbert.reporting.report import report  # noqa: E402

SECTIONS = {
    "scores": "Scores and baselines", "curves": "Learning curves", "sst": "Task sst", "para": "Task para",
    "sts": "Task sts", "gradients": "Gradient conflicts", "seeds": "Seeds", "costs": "Time and memory",
}  # fmt: skip


@pytest.fixture(scope="module")
def page_of_a_run(finished_run, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "DPI", 60)  # which draws quicker; a page's pictures are as wide as it gives them room
        return report(finished_run, output_dir=tmp_path_factory.mktemp("report"))[0]


def test_every_section_is_there_and_its_pictures_load(page_of_a_run, browser_page, console_errors):
    asked = []
    browser_page.on("request", lambda request: asked.append(request.url))
    browser_page.goto(page_of_a_run.as_uri())
    for key, title in SECTIONS.items():
        browser_page.get_by_role("link", name=title, exact=True).click()
        assert browser_page.url.endswith(f"#{key}")
        assert browser_page.locator(f"section#{key} > h2").inner_text() == title
    pictures = browser_page.locator("figure img")
    assert pictures.count() > 20
    assert pictures.evaluate_all("all => all.every(image => image.complete && image.naturalWidth > 100 && image.alt)")
    assert {url.split(":")[0] for url in asked} <= {"file", "data"}
    assert not console_errors


def test_at_a_phones_width_only_tables_scroll_sideways(page_of_a_run, browser_page, console_errors):
    browser_page.set_viewport_size({"width": 390, "height": 844})
    browser_page.goto(page_of_a_run.as_uri())
    assert browser_page.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser_page.locator("figure img").first.bounding_box()["width"] > 300
    assert not console_errors
