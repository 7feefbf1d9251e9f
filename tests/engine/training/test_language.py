"""An evaluation says in which language a conversation was held."""

import pytest

from engine.training import language
from engine.training.language import UNKNOWN, language_of

TEXTS = {
    "en": "Photosynthesis is the process by which plants turn sunlight into sugar.",
    "es": "La fotosíntesis es el proceso por el cual las plantas producen azúcar con la luz.",
    "de": "Die Photosynthese ist der Vorgang, bei dem Pflanzen aus Licht Zucker herstellen.",
    "zh": "光合作用是植物利用阳光把二氧化碳和水转化为糖和氧气的过程,它是地球生命的基础。",
}


@pytest.mark.parametrize("code", TEXTS)
def test_languages_are_told_apart(code: str) -> None:
    assert language_of(TEXTS[code]) == code


@pytest.mark.parametrize("text", ["", "42", "OK.", "3.14159 + 2.71828 = 5.85987 = 5.85987 (1234)"])
def test_what_is_hardly_a_text_has_no_language(text: str) -> None:
    assert language_of(text) == UNKNOWN


def test_without_the_package_every_language_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_identifier", lambda: None)
    assert language_of(TEXTS["en"]) == UNKNOWN
