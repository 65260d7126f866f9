"""Word lists for lists, spelling, names and JSON. Data only."""

NAMES = (
    "Ada Alan Grace Linus Mia Noah Emma Liam Olivia Lucas Sofia Leo Anna Max Clara Paul Nina Tom "
    "Eva Ben Lena Jonas Maria Peter Julia David Sara Felix Laura Simon Ida Oscar Ella Hugo Alice "
    "Bob Carol Eve Frank Heidi Ivan Judy Karl Lisa Mark Nora Otto Rosa Sam Tina Uma Vera Will Yara "
    "Zoe Omar Aisha Kenji Yuki Priya Ravi Chen Mei Diego Lucia Pedro Ines Amir Layla John Jane Mary"
).split()
CITIES = (
    "Berlin Paris London Rome Madrid Lisbon Vienna Prague Oslo Dublin Athens Tokyo Cairo Lima Delhi "
    "Boston Chicago Toronto Sydney Geneva Milan Munich Hamburg Warsaw Helsinki Stockholm"
).split()
CATEGORIES = {
    "colours": "red green blue yellow orange purple black white brown grey".split(),
    "animals": "cat dog horse cow bird fish lion bear fox mouse".split(),
    "fruits": "apple banana cherry pear plum orange lemon grape melon peach".split(),
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split(),
    "days of the week": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "months": "January February March April May June July August September October".split(),
    "vegetables": "carrot potato onion tomato pea bean leek cabbage".split(),
    "birds": "robin swan duck owl eagle crow gull wren".split(),
    "trees": "oak pine birch maple willow beech ash elm".split(),
    "instruments": "piano violin flute drum guitar harp trumpet cello".split(),
    "programming languages": "Python Rust Swift C Java Go Ruby Lua".split(),
    "drinks": "water tea coffee milk juice cocoa".split(),
    "shapes": "circle square triangle line cube sphere".split(),
    "sampling parameters": "temperature top_k top_p min_p seed max_tokens".split(),
    "commands of mlxinfer": "run chat serve convert pull list show doctor".split(),
}
ALIASES = {"colours": ("colors", "colours"), "months": ("months", "months of the year")}
SHORT_WORDS = (
    "cat dog sun moon tree key page cache token model layer head value query step batch tail seed "
    "score scale group prompt prefix window sink draft grammar metal apple chip memory bit byte word "
    "text list table pool queue stack graph node leaf root branch light night day water stone house "
    "door book lamp chair bread milk salt green blue red white black snow rain wind cloud star fish "
    "bird horse mouse hand foot eye ear nose one two three four five six seven eight nine ten hello "
    "world music piano river lake ocean forest garden flower paper pencil letter number python"
).split()
NUMBER_WORDS = "zero one two three four five six seven eight nine ten".split()
FIELDS = {
    "name": NAMES,
    "age": range(1, 100),
    "city": CITIES,
    "country": "Germany France Italy Spain Norway Japan Canada Brazil".split(),
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
