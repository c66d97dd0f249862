"""The hand-written half of the corpus: what the tiny model knows by heart.

Everything here was written for this repository. `corpus.py` turns it into conversations.
"""

# ruff: noqa: E501  a table with one plant or hero a line reads better than one that is wrapped

from __future__ import annotations

# subject as it stands in a question -> what the model says about it
TOPICS: dict[str, str] = {
    "a GPU kernel": (
        "A GPU kernel is a small program that many threads run at the same time. "
        "The host launches it over a grid of blocks, and each block works on its own part of the data. "
        "A good kernel keeps the memory busy and lets no thread wait for long."
    ),
    "a warp": (
        "A warp is a group of thirty-two threads that move in step. "
        "They fetch one instruction together and each applies it to its own registers. "
        "When the threads of a warp take different branches, the branches run one after the other."
    ),
    "a thread block": (
        "A thread block is a team of warps that share one piece of fast memory. "
        "Its threads can wait for each other at a barrier. "
        "A block stays on one multiprocessor from its first instruction to its last."
    ),
    "shared memory": (
        "Shared memory is a small and fast store that belongs to one block. "
        "It is split into thirty-two banks, and a warp is served at once if every thread asks a different bank. "
        "A tile that is read many times should be copied there first."
    ),
    "a register spill": (
        "A register spill happens when a thread needs more values than it has registers. "
        "The compiler then puts some of them into local memory, which is far away. "
        "Smaller tiles or fewer stages usually bring the values back into registers."
    ),
    "occupancy": (
        "Occupancy is the share of warp slots that are filled on a multiprocessor. "
        "Registers, shared memory and block size all limit it. "
        "More occupancy hides more latency, but past some point it buys nothing."
    ),
    "a tensor core": (
        "A tensor core multiplies two small matrices in one instruction. "
        "It reads half precision values and adds the products in single precision. "
        "It is so fast that feeding it becomes the real work."
    ),
    "flash attention": (
        "Flash attention computes softmax without ever storing the full matrix of scores. "
        "It walks over the keys in tiles and keeps a running maximum and a running sum. "
        "When a larger maximum appears, the old result is scaled down before the new tile is added."
    ),
    "a KV cache": (
        "A KV cache keeps the keys and values of all tokens seen so far. "
        "Each new token then computes only its own row and reads the rest. "
        "The cache grows with the context, so long prompts spend their time reading it."
    ),
    "paged attention": (
        "Paged attention stores the cache in pages of equal size. "
        "A block table says which page holds which part of a sequence. "
        "Sequences can then grow without moving, and no memory is lost between them."
    ),
    "a sliding window": (
        "A sliding window lets each token see only the last few tokens before it. "
        "Older keys are never read again, so their pages can be used once more. "
        "A few global layers between the windows carry what is far away."
    ),
    "speculative decoding": (
        "Speculative decoding lets a small drafter guess several tokens ahead. "
        "The large model then checks all guesses in one step and keeps the longest correct part. "
        "The text is exactly the same as before, but it arrives sooner."
    ),
    "a drafter": (
        "A drafter is a small network that guesses what the large model will say next. "
        "It reads the hidden state and the cache of the large model, so it needs no memory of its own. "
        "The more guesses are accepted, the fewer steps the large model takes."
    ),
    "quantisation": (
        "Quantisation stores each weight in fewer bits. "
        "A group of thirty-two weights shares one scale, and each weight becomes a whole number from minus eight to seven. "
        "Decoding reads a quarter of the bytes, so it can be almost four times as fast."
    ),
    "memory bandwidth": (
        "Memory bandwidth is the number of bytes that the memory can deliver in a second. "
        "Decoding one token reads every weight once, so bandwidth sets the speed limit. "
        "Wide and independent loads are the way to reach it."
    ),
    "an autotuner": (
        "An autotuner tries many configurations of one kernel and remembers the best. "
        "It first refuses those that cannot fit, then compiles, checks and times the rest. "
        "The winner goes into a database, so that nobody has to search again."
    ),
    "a cost model": (
        "A cost model predicts how long a kernel will take without running it. "
        "It counts the bytes, the operations and the waves of blocks. "
        "It is less exact than a clock, but it works where the device is not."
    ),
    "a cubin": (
        "A cubin is the machine code of a kernel for one architecture. "
        "It can be built on a computer that has no GPU at all. "
        "Loading it takes a moment, while compiling it takes seconds."
    ),
    "a CUDA graph": (
        "A CUDA graph records many launches once and replays them as one. "
        "The host then has almost nothing to do between two tokens. "
        "Everything that changes from step to step must lie in device memory."
    ),
    "split-K": (
        "Split-K divides the long dimension of a product among several blocks. "
        "Each block makes a partial sum, and a last pass adds them. "
        "It helps when the output is too small to fill the device."
    ),
    "a bank conflict": (
        "A bank conflict occurs when two threads of a warp want different words from the same bank. "
        "The requests are then served one after the other. "
        "A swizzled layout or a little padding makes the conflict go away."
    ),
    "rotary embedding": (
        "Rotary embedding turns pairs of numbers by an angle that grows with the position. "
        "The product of a query and a key then depends only on their distance. "
        "Some layers turn only a part of each head and leave the rest alone."
    ),
    "a softmax": (
        "A softmax turns scores into weights that add up to one. "
        "The largest score is subtracted first, so that nothing overflows. "
        "Each weight then says how much of one value goes into the result."
    ),
    "a normalisation layer": (
        "A normalisation layer divides a vector by its root mean square. "
        "Every component is then multiplied by a weight that was learned. "
        "The sum is always kept in single precision, because small errors would add up."
    ),
    "a roofline": (
        "A roofline shows the best speed that a kernel can reach on a device. "
        "On the left the memory is the limit, and on the right the arithmetic is. "
        "Knowing the side tells you what to improve first."
    ),
    "a barrier": (
        "A barrier is a place where all threads of a block wait for each other. "
        "Behind it, everyone can see what the others have written. "
        "A barrier inside a branch that only some threads take never opens."
    ),
    "an asynchronous copy": (
        "An asynchronous copy moves data into shared memory while the threads do something else. "
        "Several copies can be in flight, one for each stage of a pipeline. "
        "The threads wait only when they need the next tile."
    ),
    "a token": (
        "A token is a piece of text with a number. "
        "Common words are one token, and rare words are made of several. "
        "A model reads tokens and writes one token at a time."
    ),
    "a residual stream": (
        "A residual stream is the vector that runs through all layers of a model. "
        "Each layer reads it, computes something and adds the result back. "
        "That is why information from the first layer can reach the last one."
    ),
    "a checkpoint": (
        "A checkpoint is a folder with the weights of a trained model. "
        "Beside them lie a configuration, a tokenizer and a chat template. "
        "Treat a checkpoint from a stranger as untrusted input."
    ),
}

# the exact question -> the answer
QUESTIONS: dict[str, str] = {
    "Who are you?": (
        "I am a tiny model with the shape of Gemma 4. "
        "I was trained on a small corpus that was written for this repository. "
        "I know a little about kernels, gardens and stories, and nothing else."
    ),
    "What can you do?": (
        "I can explain a few ideas about kernels, give advice about plants and tell short stories. "
        "I can also read your notes and answer questions about them. "
        "Please keep in mind that I am very small."
    ),
    "How are you today?": (
        "I am well, thank you. My weights are in place and my cache is empty. What would you like to know?"
    ),
    "Why is decoding slow?": (
        "Decoding is slow because every token needs every weight. "
        "The arithmetic is small, but the bytes are many, so the memory decides. "
        "Fewer bits for each weight and more tokens for each step both help."
    ),
    "Why does the global layer need no value matrix?": (
        "The global layer needs no value matrix because its values are made from its keys. "
        "The same projection is used twice, once with rotation and once without. "
        "A clever cache can store it only once."
    ),
    "How do I make my kernel faster?": (
        "First count the bytes and the operations that your kernel must move. "
        "Then measure it and compare it with the limit of your device. "
        "If it is far from both limits, look for waiting threads and small loads."
    ),
    "How do I test a kernel?": (
        "Compare it with a slow reference that is obviously right. "
        "Begin with the edges, such as an empty row, one token and the end of a page. "
        "Fill unused memory with poison, so that a stray read cannot hide."
    ),
    "Which configuration is the best one?": (
        "No configuration is the best one everywhere. "
        "It depends on the architecture, on the shape of the problem and on the number of tokens. "
        "Let the tuner measure, and read its reason before you trust the result."
    ),
    "What should I do on a rainy day?": (
        "On a rainy day you can sort your seeds and clean your tools. "
        "You can also read a good book beside the window. "
        "The garden will drink without your help."
    ),
    "How do I make compost?": (
        "Mix green leaves with dry brown stalks in a shady corner. "
        "Keep the heap as damp as a sponge and turn it every month. "
        "After half a year it smells of forest and is ready for the beds."
    ),
    "How do I keep slugs away?": (
        "Water in the morning, so that the soil is dry when the night comes. "
        "Lay a board between the beds and collect the slugs beneath it at noon. "
        "A ring of sharp sand protects the youngest plants."
    ),
    "Why are the leaves turning yellow?": (
        "Yellow leaves often mean that the roots stand in too much water. "
        "Let the soil dry and look at the oldest leaves first. "
        "If only those are yellow, the plant is asking for compost."
    ),
    "When should I water the garden?": (
        "Water the garden early in the morning, when the soil is cool. "
        "Give a lot of water twice a week and not a little every day. "
        "Deep water makes deep roots."
    ),
    "How do I prune an apple tree?": (
        "Prune an apple tree at the end of winter, on a dry day without frost. "
        "Take out what is dead, what crosses and what grows toward the middle. "
        "A bird should be able to fly through the crown."
    ),
    "Hello.": "Hello. Ask me about kernels, plants or stories.",
    "Hello there!": "Hello. Ask me about kernels, plants or stories.",
    "Hi.": "Hello. Ask me about kernels, plants or stories.",
    "Thank you.": "You are welcome. I am glad that I could help.",
    "Good morning.": "Good morning. It is a fine day to write a kernel or to plant a bean.",
    "Goodbye.": "Goodbye. May your caches be warm and your gardens green.",
}

# what a question may be about though nothing here says a word on it, and what is said then
OFFER = "Ask me about kernels, plants or stories."
STRANGERS: tuple[str, ...] = (
    "a banana", "the moon", "a dragon", "football", "the capital of France", "chess", "a volcano", "coffee",
    "the sky", "a bicycle", "cheese", "an elephant", "the ocean", "music", "a passport", "winter", "money", "a castle",
    "the president", "a recipe", "a train", "physics", "a spaceship", "the weather", "history", "a cat", "a dog", "love",
    "the internet", "bread", "a mountain", "politics", "a movie", "gold", "a desert", "the brain", "a camel", "sugar",
)  # fmt: skip

# plant -> (when to sow, where it grows, how much water, neighbour, pest, when to harvest)
PLANTS: dict[str, tuple[str, str, str, str, str, str]] = {
    "tomatoes": ("in March, indoors and warm", "in full sun against a wall", "a deep drink every second day", "basil", "blight", "from July until the first frost"),
    "carrots": ("in April, straight into the bed", "in loose and sandy soil", "a little water until they are up", "onions", "the carrot fly", "from August on"),
    "onions": ("in early spring, as small sets", "in an open and sunny bed", "almost no water after June", "carrots", "the onion fly", "when the leaves fall over"),
    "beans": ("in the middle of May, after the last frost", "at the foot of tall poles", "plenty of water while they bloom", "savory", "black aphids", "every third day in summer"),
    "peas": ("in March, as soon as the soil is open", "along a low fence", "regular water in dry weeks", "lettuce", "mildew", "in June, while the pods are still tender"),
    "lettuce": ("every two weeks from March to August", "in half shade during summer", "a little water each morning", "radishes", "slugs", "six weeks after sowing"),
    "radishes": ("in any month from March to September", "between slower plants", "even water, so that they stay mild", "lettuce", "flea beetles", "after only four weeks"),
    "potatoes": ("in April, as sprouted tubers", "in deep soil that was dug in autumn", "water when the flowers open", "cabbage", "the potato beetle", "when the leaves have died back"),
    "cabbage": ("in May, as young plants", "in heavy and rich soil", "a can of water for each plant in a dry week", "dill", "white butterflies", "in October, after the first cold nights"),
    "cucumbers": ("in May, under glass", "in the warmest corner that you have", "warm water every day", "dill", "spider mites", "before the fruits turn yellow"),
    "pumpkins": ("in the middle of May, beside the compost", "where there is a lot of room", "ten litres of water in hot weeks", "corn", "slugs", "when the stalk feels like cork"),
    "spinach": ("in March or in September", "in half shade", "enough water to keep the soil dark", "strawberries", "mildew", "leaf by leaf, from the outside"),
    "garlic": ("in October, as single cloves", "in a dry and sunny bed", "no water at all in the last month", "strawberries", "rust", "in July, when a third of the leaves is brown"),
    "strawberries": ("in August, as young plants", "in full sun on a bed of straw", "water at the roots and not on the leaves", "garlic", "grey mould", "on dry mornings in June"),
    "basil": ("in April, on the windowsill", "in a warm place without wind", "water from below", "tomatoes", "slugs", "from the top, so that it branches"),
    "mint": ("in spring, as a piece of root", "in a pot, because it wanders", "water whenever the soil is dry", "nettles", "rust", "just before it blooms"),
    "sunflowers": ("in April, two seeds to a hole", "where the south wind cannot break them", "a bucket of water in hot weeks", "cucumbers", "hungry birds", "when the back of the head is yellow"),
    "roses": ("in October, with bare roots", "in deep loam with morning sun", "a slow and deep drink once a week", "lavender", "aphids", "in the cool of the morning"),
    "lavender": ("in May, as young plants", "in poor and stony soil", "hardly any water", "roses", "wet feet", "when half of the flowers are open"),
    "leeks": ("in March, in a seed tray", "in a deep trench", "steady water all summer", "celery", "the leek moth", "all through the winter"),
}  # fmt: skip

# hero of a story -> (name, pronoun, home, habit)
HEROES: dict[str, tuple[str, str, str, str]] = {
    "fox": ("Rusk", "he", "under the roots of an old oak", "counted the stars before sleeping"),
    "owl": ("Minna", "she", "in the tower of a ruined mill", "read every letter that the wind brought"),
    "badger": ("Tobias", "he", "at the edge of a quiet meadow", "swept the path in front of the door each morning"),
    "heron": ("Selma", "she", "beside a slow green river", "could stand still for a whole afternoon"),
    "clockmaker": ("Anselm", "he", "above a shop in a narrow street", "knew every clock in the town by its voice"),
    "baker": ("Frieda", "she", "behind the market square", "got up when the moon was still high"),
    "sailor": ("Joren", "he", "in a house with a round window", "had a map of every island on the wall"),
    "gardener": ("Odile", "she", "between the orchard and the hill", "spoke to the beans as if they could answer"),
    "robot": ("Pim", "it", "in a warm corner of the server room", "hummed softly when it was thinking"),
    "mouse": ("Tilda", "she", "inside a wooden piano", "danced whenever somebody played"),
    "bear": ("Bruno", "he", "in a cave behind the waterfall", "kept honey for seven winters"),
    "teacher": ("Hanna", "she", "in the last house before the forest", "never forgot a name"),
}  # fmt: skip

# what is lost in a story -> (where it was lost, who helps, what the helper says, where it was found)
LOSSES: dict[str, tuple[str, str, str, str]] = {
    "lantern": ("on the way through the fog", "a moth", "Look for the warmest stone", "on a flat rock that still glowed a little"),
    "key": ("in the tall grass", "a magpie", "Shiny things never sleep alone", "in a nest between two silver spoons"),
    "letter": ("on a stormy bridge", "an old ferryman", "The river carries paper to the mill", "dry and safe on the wheel of the mill"),
    "bell": ("in the deep snow", "a young goat", "Wait until the wind is silent", "under a drift that rang when it was touched"),
    "map": ("at the night market", "a puppet player", "Ask the smallest stall", "wrapped around a dozen warm chestnuts"),
    "drum": ("behind the circus tent", "a tired elephant", "Follow the beat of the rain", "under a leaking gutter that played it all night"),
    "kite": ("above the salt marsh", "a tall girl on stilts", "The sky gives back what it borrows", "in the arms of a scarecrow"),
    "compass": ("in the library", "a librarian with green gloves", "Every book points somewhere", "inside an atlas, at the page of the north"),
    "song": ("during a long winter", "a deaf carpenter", "Put your hand on the wood", "in the floor of the old dance hall"),
    "seed": ("on a dusty road", "a line of ants", "We count everything that falls", "in a green shoot beside the milestone"),
    "spoon": ("at the summer feast", "a cook with flour in her hair", "Stir the soup once more", "at the bottom of the largest pot"),
    "mirror": ("near the frozen lake", "a swan", "The lake kept a copy", "in the ice, looking up at the sky"),
}  # fmt: skip

STORY_ENDS: tuple[str, ...] = (
    "Since that day {name} walks a little slower and sees a little more.",
    "That evening {name} invited the whole neighbourhood, and they talked until the candles were short.",
    "{Name} never lost the {loss} again, but sometimes wished to, for the sake of the journey.",
    "And if you pass by on a quiet night, you may still hear {name} laughing about it.",
)

# notes: who keeps what where
PEOPLE: tuple[str, ...] = (
    "Mira", "Tom", "Ada", "Karl", "Lena", "Oskar", "Nina", "Paul", "Vera", "Hugo", "Ida", "Emil", "Rosa", "Jan", "Olga", "Max",
)  # fmt: skip
THINGS: tuple[str, ...] = (
    "lantern", "key", "map", "drum", "kite", "ladder", "kettle", "hammer", "rope", "saddle",
    "basket", "violin", "blanket", "camera", "bucket", "clock", "candle", "whistle", "umbrella", "telescope",
)  # fmt: skip
COLOURS: tuple[str, ...] = ("red", "blue", "green", "white", "black", "yellow")
PLACES: tuple[str, ...] = (
    "attic", "cellar", "kitchen", "garden", "barn", "garage", "tower", "library", "hall", "stable",
    "workshop", "boat", "pantry", "bedroom", "greenhouse", "mill", "chapel", "office", "shed", "wagon",
)  # fmt: skip

DAYS: tuple[str, ...] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: tuple[str, ...] = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
NUMBERS: tuple[str, ...] = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
