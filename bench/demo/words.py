"""The demo's lexicon: the words its sentences and task inputs are made of. Written for corun."""

ADJECTIVES = """
    small big red blue green old young quiet loud bright dark warm cold quick slow happy kind
    brave soft round clean wild
""".split()

NOUNS = """
    fox cat dog bird horse fish mouse bear tree river house garden stone cloud road boat lamp book
    bridge market window mountain forest village farmer teacher child sailor baker painter apple
    bread letter music winter summer morning evening island planet
""".split()

VERBS = """
    sees likes finds follows paints helps hears calls meets carries watches visits draws knows
    greets misses
""".split()

PLACES = ("near", "behind", "under", "above", "beside", "in front of")

SMALL_WORDS = """
    a the and we you it is hello world good day thanks yes no open run now very new my our fast
    one two six zero brown lazy jumps over many model adapter server memory token write read
    please what this that with from have of to in Python language machine people friend night
    water light question
""".split()

ALL_WORDS = tuple(dict.fromkeys(ADJECTIVES + NOUNS + VERBS + SMALL_WORDS))
