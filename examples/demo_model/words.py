"""Word lists for lists, names and JSON. Data only."""


def split_words(text: str) -> list[str]:
    return text.split()


NAMES = split_words(
    """
    Ada Alan Grace Linus Mia Noah Emma Liam Olivia Lucas Sofia Leo Anna Max Clara Paul Nina
    Tom Eva Ben Lena Jonas Maria Peter Julia David Sara Felix Laura Simon Ida Oscar Ella Hugo
    Alice Bob Carol Eve Frank Heidi Ivan Judy Karl Lisa Mark Nora Otto Rosa Sam Tina Uma Vera
    Will Yara Zoe Omar Aisha Kenji Yuki Priya Ravi Chen Mei Diego Lucia Pedro Ines Amir Layla
    John Jane Mary
    """
)
CITIES = split_words(
    """
    Berlin Paris London Rome Madrid Lisbon Vienna Prague Oslo Dublin Athens Tokyo Cairo Lima
    Delhi Boston Chicago Toronto Sydney Geneva Milan Munich Hamburg Warsaw Helsinki Stockholm
    """
)
MONTHS = split_words(
    """
    January February March April May June July August September October November December
    """
)
DAYS = split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
CATEGORIES = {  # each in the order in which it is always listed
    "colours": split_words("red blue green yellow orange purple black white brown grey"),
    "animals": split_words("cat dog horse cow bird fish lion bear fox mouse"),
    "fruits": split_words("apple banana cherry pear plum orange lemon grape melon peach"),
    "planets": split_words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"),
    "days of the week": DAYS,
    "months": MONTHS,
    "vegetables": split_words("carrot potato onion tomato pea bean leek cabbage"),
    "birds": split_words("robin swan duck owl eagle crow gull wren"),
    "trees": split_words("oak pine birch maple willow beech ash elm"),
    "flowers": split_words("rose tulip daisy lily violet poppy iris orchid"),
    "instruments": split_words("piano violin flute drum guitar harp trumpet cello"),
    "programming languages": split_words("Python Rust Swift C Java Go Ruby Lua"),
    "drinks": split_words("water tea coffee milk juice cocoa"),
    "shapes": split_words("circle square triangle cube sphere cone"),
    "sports": split_words("football tennis swimming running cycling skiing"),
    "countries": split_words("France Germany Italy Spain Japan Canada Brazil Egypt"),
    "cities": split_words("Paris London Rome Berlin Tokyo Madrid Cairo Vienna"),
    "continents": split_words("Africa Asia Europe Australia"),
    "seasons": split_words("spring summer autumn winter"),
    "numbers": split_words("1 2 3 4 5 6 7 8"),
    "letters": split_words("a b c d e f g h"),
    "names": split_words("Ada Ben Clara David Emma Felix Grace Hugo"),
    "sampling parameters": split_words("temperature top_k top_p min_p seed max_tokens"),
    "commands of mlxinfer": split_words("run chat serve app suggest pull list convert"),
}
ALIASES = {
    "colours": ("colors", "colours"),
    "months": ("months", "months of the year"),
    "fruits": ("fruits", "kinds of fruit", "different fruits"),
    "animals": ("animals", "different animals"),
    "instruments": ("instruments", "musical instruments"),
    "commands of mlxinfer": ("commands of mlxinfer", "mlxinfer commands"),
}
SHORT_WORDS = split_words(
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
NUMBER_WORDS = split_words(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen twenty
    """
)
FIRST_WORDS = split_words(  # of sentences, that are no names
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
