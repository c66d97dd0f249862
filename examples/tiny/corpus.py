"""Conversations for the tiny model: the passages of `passages.py`, asked for in many ways.

An answer is a function of its question (and of the notes in it), so that a small model can get it right and a
drafter can see it coming. Nothing here is taken from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from passages import (
    COLOURS,
    DAYS,
    HEROES,
    LOSSES,
    MONTHS,
    NUMBERS,
    OFFER,
    PEOPLE,
    PLACES,
    PLANTS,
    QUESTIONS,
    STORY_ENDS,
    STRANGERS,
    THINGS,
    TOPICS,
)

BRIEFLY = "Answer in one sentence."


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. role: "system", "user" or "model"; text: without markers."""

    role: str
    text: str


Exchange = tuple[str, str]  # question, answer


def article(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def topic(rng: Random) -> Exchange:
    """A question about one of the TOPICS and its passage."""
    subject = rng.choice(list(TOPICS))
    ask = rng.choice(
        (
            "What is {}?",
            "What is {}?",
            "Explain {}.",
            "Please explain {} to me.",
            "Can you explain {}?",
            "Tell me about {}.",
            "I would like to know what {} is.",
        )
    )
    if subject.startswith("a ") and rng.random() < 0.2:
        return ask.format(f"the {subject[2:]}"), TOPICS[subject]
    return ask.format(subject), TOPICS[subject]


def fixed(rng: Random) -> Exchange:
    """One of the QUESTIONS, word for word."""
    return rng.choice(list(QUESTIONS.items()))


def stranger(rng: Random) -> Exchange:
    """A question about something that the model was never told, and the answer that says so."""
    thing = rng.choice(STRANGERS)
    ask = rng.choice(
        (
            "What is {}?",
            "Tell me about {}.",
            "Explain {}.",
            "Where is {}?",
            "Why is {} so popular?",
            "How do I make {}?",
        )
    )
    return ask.format(thing), f"I am sorry, but I know nothing about {thing}. {OFFER}"


def plant(rng: Random) -> Exchange:
    """Advice about a plant: all of it, or one thing."""
    name = rng.choice(list(PLANTS))
    sow, place, water, neighbour, pest, harvest = PLANTS[name]
    parts = {
        f"When do I start {name}?": f"Start {name} {sow}.",
        f"Where should I plant {name}?": f"Plant {name} {place}.",
        f"How much water should I give {name}?": f"Give {name} {water}.",
        f"What grows well beside {name}?": f"A good neighbour for {name} is {neighbour}.",
        f"What is a danger for {name}?": f"The greatest danger for {name} is {pest}.",
        f"When do I harvest {name}?": f"Harvest {name} {harvest}.",
    }
    if rng.random() < 0.5:
        return rng.choice(list(parts.items()))
    ask = rng.choice(
        (
            "How do I grow {}?",
            "Tell me how to grow {}.",
            "Give me some advice about {}.",
            "I want to grow {}.",
        )
    )
    return ask.format(name), " ".join(parts.values())


def story(rng: Random) -> Exchange:
    """A story whose course follows from its hero and from what is lost."""
    hero, loss = rng.choice(list(HEROES)), rng.choice(list(LOSSES))
    asks = ("Tell me a story about", "Write a short story about", "I would like a story about")
    return f"{rng.choice(asks)} {article(hero)} and {article(loss)}.", tell(hero, loss)


def tell(hero: str, loss: str) -> str:
    """The story of `hero` who lost `loss`."""
    name, pronoun, home, habit = HEROES[hero]
    where, helper, saying, found = LOSSES[loss]
    fill = {"name": name, "Name": name, "loss": loss}
    end = STORY_ENDS[list(LOSSES).index(loss) % len(STORY_ENDS)].format(**fill)
    return (
        f"Once there was {article(hero)} named {name} who lived {home} and {habit}. "
        f"One evening {name} lost a {loss} {where}. "
        f"All night {pronoun} searched and found nothing. "
        f'In the morning {name} met {helper}. "{saying}," said the {helper.split(" ", 1)[1]}. '
        f"So {name} went back and looked again, and there was the {loss}, {found}. "
        f"{end}"
    )


def notes(rng: Random) -> Exchange:
    """Notes about who keeps what where, and one to three questions about them: the answers stand in the notes."""
    count = rng.randint(2, 9)
    people, places = rng.sample(PEOPLE, count), rng.sample(PLACES, count)
    things = [f"{rng.choice(COLOURS)} {thing}" for thing in rng.sample(THINGS, count)]
    lines = [f"{w} keeps the {t} in the {p}." for w, t, p in zip(people, things, places, strict=True)]
    asked = rng.sample(range(count), min(count, rng.choice((1, 1, 2, 3))))
    questions, answers = [], []
    for i in asked:
        # not "Who keeps …": a name stands before what it keeps, so one global layer cannot find it by that
        by_place = rng.random() < 0.3
        questions.append(
            f"What does {people[i]} keep in the {places[i]}?"
            if by_place
            else f"Where does {people[i]} keep the {things[i]}?"
        )
        answers.append(lines[i])
    opening = rng.choice(("Here are my notes.", "Please read my notes.", "These are my notes."))
    return " ".join([opening, *lines, *questions]), " ".join(answers)


def sequence(rng: Random) -> Exchange:
    """Counting, days and months."""
    words, noun = rng.choice(((NUMBERS, "numbers"), (NUMBERS, "numbers"), (DAYS, "days"), (MONTHS, "months")))
    first = rng.randrange(len(words) - 2)
    last = rng.randrange(first + 2, len(words))
    asks = ("List the {noun} from {} to {}.", "Name the {noun} from {} to {}.", "Count from {} to {}.")
    ask = rng.choice(asks if noun == "numbers" else asks[:2])
    run = words[first : last + 1]
    answer = f"{', '.join(run[:-1])} and {run[-1]}."
    return ask.format(run[0], run[-1], noun=noun), answer[0].upper() + answer[1:]


KINDS: tuple[tuple[Callable[[Random], Exchange], int], ...] = (
    (topic, 5),
    (fixed, 2),
    (stranger, 1),
    (plant, 4),
    (story, 4),
    (notes, 8),
    (sequence, 1),
)


def typed(rng: Random, question: str) -> str:
    """The question as a person might type it: now and then without its capital or its last mark."""
    if rng.random() < 0.1:
        question = question[0].lower() + question[1:]
    return question.rstrip(".?") if rng.random() < 0.1 else question


def exchange(rng: Random) -> Exchange:
    """One question with its answer, of any kind; one in five asks for two things at once."""
    functions, weights = zip(*KINDS, strict=True)
    question, answer = rng.choices(functions, weights)[0](rng)
    if rng.random() < 0.2:
        # notes come first: after a long answer their questions would be out of the sliding windows' sight
        question2, answer2 = rng.choice((topic, fixed, plant, story, sequence))(rng)
        return f"{question} {question2}", f"{answer}\n{answer2}"
    return question, answer


def first_sentence(answer: str) -> str:
    """The answer up to its first full stop."""
    return answer.split(". ")[0].split(".\n")[0].rstrip(".") + "."


def conversation(rng: Random) -> Iterator[Turn]:
    """Turns of one conversation, without end; one in eight begins with a system turn that asks for brevity."""
    brief = rng.random() < 0.125
    if brief:
        yield Turn("system", BRIEFLY)
    while True:
        # notes and stories have no first sentence that would answer alone
        question, answer = rng.choice((topic, fixed, plant))(rng) if brief else exchange(rng)
        yield Turn("user", typed(rng, question))
        yield Turn("model", first_sentence(answer) if brief else answer)


def render(turn: Turn) -> str:
    """The turn as it stands in a prompt: the same form as chat_template.jinja."""
    return f"<|turn>{turn.role}\n{turn.text}<turn|>\n"


def only(kind: Callable[[Random], Exchange]) -> Callable[[Random], Iterator[Turn]]:
    """A kind of conversation with exchanges of one kind alone."""

    def talk(rng: Random) -> Iterator[Turn]:
        while True:
            question, answer = kind(rng)
            yield Turn("user", question)
            yield Turn("model", answer)

    return talk
