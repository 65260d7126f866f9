"""Word lists for lists, names and JSON. Data only."""


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    """
    Ada Alan Grace Linus Mia Noah Emma Liam Olivia Lucas Sofia Leo Anna Max Clara Paul Nina
    Tom Eva Ben Lena Jonas Maria Peter Julia David Sara Felix Laura Simon Ida Oscar Ella Hugo
    Alice Bob Carol Eve Frank Heidi Ivan Judy Karl Lisa Mark Nora Otto Rosa Sam Tina Uma Vera
    Will Yara Zoe Omar Aisha Kenji Yuki Priya Ravi Chen Mei Diego Lucia Pedro Ines Amir Layla
    John Jane Mary
    """
)
CITIES = _words(
    """
    Berlin Paris London Rome Madrid Lisbon Vienna Prague Oslo Dublin Athens Tokyo Cairo Lima
    Delhi Boston Chicago Toronto Sydney Geneva Milan Munich Hamburg Warsaw Helsinki Stockholm
    """
)
MONTHS = _words(
    """
    January February March April May June July August September October November December
    """
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
CATEGORIES = {  # each in the order in which it is always listed
    "colours": _words("red blue green yellow orange purple black white brown grey"),
    "animals": _words("cat dog horse cow bird fish lion bear fox mouse"),
    "fruits": _words("apple banana cherry pear plum orange lemon grape melon peach"),
    "planets": _words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"),
    "days of the week": DAYS,
    "months": MONTHS,
    "vegetables": _words("carrot potato onion tomato pea bean leek cabbage"),
    "birds": _words("robin swan duck owl eagle crow gull wren"),
    "trees": _words("oak pine birch maple willow beech ash elm"),
    "flowers": _words("rose tulip daisy lily violet poppy iris orchid"),
    "instruments": _words("piano violin flute drum guitar harp trumpet cello"),
    "programming languages": _words("Python Rust Swift C Java Go Ruby Lua"),
    "drinks": _words("water tea coffee milk juice cocoa"),
    "shapes": _words("circle square triangle cube sphere cone"),
    "sports": _words("football tennis swimming running cycling skiing"),
    "countries": _words("France Germany Italy Spain Japan Canada Brazil Egypt"),
    "cities": _words("Paris London Rome Berlin Tokyo Madrid Cairo Vienna"),
    "continents": _words("Africa Asia Europe Australia"),
    "seasons": _words("spring summer autumn winter"),
    "numbers": _words("1 2 3 4 5 6 7 8"),
    "letters": _words("a b c d e f g h"),
    "names": _words("Ada Ben Clara David Emma Felix Grace Hugo"),
    "sampling parameters": _words("temperature top_k top_p min_p seed max_tokens"),
    "commands of mlxinfer": _words("run chat serve app suggest pull list convert"),
}
ALIASES = {
    "colours": ("colors", "colours"),
    "months": ("months", "months of the year"),
    "fruits": ("fruits", "kinds of fruit", "different fruits"),
    "animals": ("animals", "different animals"),
    "instruments": ("instruments", "musical instruments"),
    "commands of mlxinfer": ("commands of mlxinfer", "mlxinfer commands"),
}
SHORT_WORDS = _words(
    """
    cat dog sun moon tree key page cache token model layer head value query step batch tail
    seed score scale group prompt prefix window sink draft grammar metal apple chip memory bit
    byte word text list table pool queue stack graph node leaf root branch light night day
    water stone house door book lamp chair bread milk salt green blue red white black snow
    rain wind cloud star fish bird horse mouse hand foot eye ear nose one two three four five
    six seven eight nine ten hello world music piano river lake ocean forest garden flower
    paper pencil letter number python
    """
)
NUMBER_WORDS = _words(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen twenty
    """
)
FIRST_WORDS = _words(  # of sentences, that are no names
    """
    It In At After Now Finally Then They She He We Everybody Nobody Children Visitors People The
    A An So But His Her Their Many Some Most All There My Our No This That These Both On When While
    """
)
FIELDS = {  # the value that a JSON object gets where a question names the key alone
    "name": "Ada",
    "age": 36,
    "city": "London",
    "country": "England",
    "colour": "red",
    "animal": "cat",
    "fruit": "apple",
    "title": "One More Token",
    "year": 2026,
    "price": 9.99,
    "email": "ada@example.com",
    "id": 1,
    "score": 100,
    "size": "medium",
    "language": "English",
    "active": True,
    "admin": False,
    "tags": ["new", "small"],
    "scores": [1, 2, 3],
}
