"""Word problems in the style of GSM8K, with their answers, for the examples that search for solutions."""

import re

SHOTS = """\
Question: Ann has 3 boxes of 4 pens and gives 5 pens away. How many pens does she keep?
Solution:
3 boxes of 4 pens are 3 * 4 = 12 pens.
12 pens without 5 pens are 12 - 5 = 7 pens.
Answer: 7

Question: A train goes 60 km in an hour. How far does it go in 3 hours and a half?
Solution:
In 3 hours it goes 3 * 60 = 180 km.
In half an hour it goes 60 / 2 = 30 km.
Together that is 180 + 30 = 210 km.
Answer: 210

"""
PROBLEMS = {
    "Tom buys 4 apples for 2 dollars each and pays with a 20 dollar bill. How much money does he get back?": 12,
    "A school has 5 classes of 20 children. 10 children are ill. How many children are at school?": 90,
    "Mia reads 10 pages a day. Her book has 120 pages and she has read 50. How many days does she still need?": 7,
}
_NUMBER = re.compile(r"-?\d+")


def prompt_for(question: str) -> str:
    """Two solved problems and one to solve."""
    return f"{SHOTS}Question: {question}\nSolution:\n"


def answer_in(text: str) -> int | None:
    """The number a solution comes to."""
    _, found, answer = text.partition("Answer:")
    number = _NUMBER.search(answer) if found else None
    return None if number is None else int(number.group())
