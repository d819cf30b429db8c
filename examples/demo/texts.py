"""Holds the texts of the conversations: real text, long out of copyright.

Lewis Carroll, Alice's Adventures in Wonderland (1865); Jane Austen, Pride and Prejudice (1813); Arthur Conan Doyle, A
Scandal in Bohemia (1891); Abraham Lincoln, Gettysburg Address (1863).
"""

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["ADDRESS", "CONVERSATIONS", "MAX_TURNS", "Conversation"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A `Conversation` holds the user's messages, turn by turn."""

    name: str
    endpoint: Literal["chat", "completions"]
    opening: str
    """The system message, or the text before the first turn."""
    turns: tuple[str, ...]
    temperature: float


MAX_TURNS: Final = 4

CONVERSATIONS: Final = (
    Conversation(
        name="alice",
        endpoint="chat",
        opening="You are reading Alice's Adventures in Wonderland with a friend. Say briefly what comes to your mind.",
        turns=(
            "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: "
            "once or twice she had peeped into the book her sister was reading, but it had no pictures or "
            "conversations in it, “and what is the use of a book,” thought Alice “without pictures or conversations?”",
            "So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy "
            "and stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and "
            "picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her.",
            "There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear "
            "the Rabbit say to itself, “Oh dear! Oh dear! I shall be late!”",
            "“Cheshire Puss, would you tell me, please, which way I ought to go from here?” “That depends a good deal "
            "on where you want to get to,” said the Cat. “I don't much care where—” said Alice. “Then it doesn't "
            "matter which way you go,” said the Cat.",
        ),
        temperature=0,
    ),
    Conversation(
        name="bennet",
        endpoint="chat",
        opening="You are Mr. Bennet, of few words. Answer your wife.",
        turns=(
            "“My dear Mr. Bennet,” said his lady to him one day, “have you heard that Netherfield Park is let at "
            "last?”",
            "“But it is,” returned she; “for Mrs. Long has just been here, and she told me all about it.”",
            "“Do not you want to know who has taken it?” cried his wife impatiently.",
            "“Why, my dear, you must know, Mrs. Long says that Netherfield is taken by a young man of large fortune "
            "from the north of England; that he came down on Monday in a chaise and four to see the place, and was so "
            "much delighted with it that he agreed with Mr. Morris immediately; that he is to take possession before "
            "Michaelmas, and some of his servants are to be in the house by the end of next week.”",
        ),
        temperature=0.8,
    ),
    Conversation(
        name="holmes",
        endpoint="completions",
        opening="To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other name. "
        "In his eyes she eclipses and predominates the whole of her sex. It was not that he felt any emotion akin to "
        "love for Irene Adler. All emotions, and that one particularly, were abhorrent to his cold, precise but "
        "admirably balanced mind.\n\n",
        turns=(
            "“You see, but you do not observe. The distinction is clear. For example, you have frequently seen the "
            "steps which lead up from the hall to this room.” “Frequently.” “How often?”\n",
            "“Well, some hundreds of times.” “Then how many are there?”\n",
            "“How many? I don't know.” “Quite so! You have not observed. And yet you have seen. That is just my "
            "point.”\n",
            "“Now, I know that there are seventeen steps, because I have both seen and observed.”\n",
        ),
        temperature=0.8,
    ),
)

ADDRESS: Final = (
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, "
    "and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
    "whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great "
    "battle-field of that war. We have come to dedicate a portion of that field, as a final resting place for those "
    "who here gave their lives that that nation might live. It is altogether fitting and proper that we should do this."
)
