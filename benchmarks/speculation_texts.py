"""Short texts to be proofread or summarized, each with a word misspelled."""

from __future__ import annotations

TEXTS = (
    (
        "The old lighthuose stood at the end of the pier. Every evening its keeper, a man named Thomas, climbed "
        "the ninety-two steps to light the lamp. He had done so for thirty years, and in all that time he had "
        "missed only one night, when a storm took the stairs away. Sailors knew the light as well as they knew "
        "the stars. On the first of May the town decided to replace the lamp by an electric one, and Thomas was "
        "told that he was not needed any more."
    ),
    (
        "The train to the coast leaves at seven every morning. Most of the people on it are fishermen and their "
        "wives, who carry baskets and do not talk much. At the second stop a boy gets on with a brown dog. The "
        "dog sits by the window and looks at the fields, and the boy reads a book about the stars. After an hour "
        "you can see the water, and everybody stands up at once, although the train still has ten minuts to go."
    ),
    (
        "Maria opened the bakery at four in the morning, long before anyone else in the street was awake. She "
        "mixed flour, water and salt, let the dough rest under a cloth, and read the newspapper while the oven "
        "grew hot. By six the first loaves lay in the window. The postman always bought two rolls, one for "
        "himself and one for his dog. On Sundays Maria baked a cake with plums, and those who came after nine "
        "found only crumbs."
    ),
    (
        "My grandmother kept bees behind her house for forty years. She wore no gloves and was never stung, "
        "because she moved slowly and spoke to them in a low voice. In June she took the first honey and gave a "
        "jar of it to each of her neighbours. In winter she wrapped the hives in straw and listened at the small "
        "doors to hear whether the bees were still alive. When she died, my father went out in the evning to tell "
        "them."
    ),
    (
        "In spring the river carries melted snow from the mountains down to the plain. The fields along its banks "
        "are flooded for two or three weeks, and the farmers move their anmials to higher ground. When the water "
        "falls, it leaves a layer of dark mud behind, in which wheat and beans grow better than anywhere else. "
        "For this reason the villages were built on small hills, and every house has a boat tied to its door."
    ),
    (
        "The school in our village has only one room and one teacher. In the morning the small children learn to "
        "read and to write, and in the afternoon the older ones learn history and numbers. When the weather is "
        "good, they all sit under the big tree in the yard. Once a year the teacher takes them to the city by "
        "bus, where they visit the zoo and the old bridge. They talk about it for weeks aftrwards."
    ),
)
