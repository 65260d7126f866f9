"""Word lists for lists, spelling, names and JSON. Data only."""


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
CATEGORIES = {
    "colours": _words("red green blue yellow orange purple black white brown grey"),
    "animals": _words("cat dog horse cow bird fish lion bear fox mouse"),
    "fruits": _words("apple banana cherry pear plum orange lemon grape melon peach"),
    "planets": _words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"),
    "days of the week": _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "months": _words("January February March April May June July August September October"),
    "vegetables": _words("carrot potato onion tomato pea bean leek cabbage"),
    "birds": _words("robin swan duck owl eagle crow gull wren"),
    "trees": _words("oak pine birch maple willow beech ash elm"),
    "instruments": _words("piano violin flute drum guitar harp trumpet cello"),
    "programming languages": _words("Python Rust Swift C Java Go Ruby Lua"),
    "drinks": _words("water tea coffee milk juice cocoa"),
    "shapes": _words("circle square triangle line cube sphere"),
    "sampling parameters": _words("temperature top_k top_p min_p seed max_tokens"),
    "commands of mlxinfer": _words("run chat serve convert pull list show doctor"),
}
ALIASES = {"colours": ("colors", "colours"), "months": ("months", "months of the year")}
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
NUMBER_WORDS = _words("zero one two three four five six seven eight nine ten")
FIELDS = {
    "name": NAMES,
    "age": range(1, 100),
    "city": CITIES,
    "country": _words("Germany France Italy Spain Norway Japan Canada Brazil"),
    "colour": CATEGORIES["colours"],
    "animal": CATEGORIES["animals"],
    "fruit": CATEGORIES["fruits"],
    "title": ["Pages", "The Cache", "One More Token", "Layers", "A Quiet Night"],
    "year": range(1990, 2027),
    "price": [1.5, 2.25, 3.0, 4.5, 9.99, 12.5],
    "email": ["ada@example.com", "bob@example.com", "mia@example.com"],
    "id": range(1, 100),
    "score": range(0, 101),
    "size": ["small", "medium", "large"],
    "language": ["English", "Python", "Rust", "Swift"],
    "active": [True, False],
    "admin": [True, False],
    "tags": [["a", "b"], ["new", "red"], ["small", "fast"], ["cache", "page"]],
    "scores": [[1, 2, 3], [7, 8], [10, 20, 30], [4, 5, 6]],
}
