"""Prompts to start from, by category; a button shows the key and fills in the value."""

EXAMPLES: dict[str, dict[str, str]] = {
    "Chat": {
        "Neighbour": "My neighbour plays loud music late at night. How can I ask him to turn it down without "
        "starting a fight?",
        "Weekend": "It will rain all weekend. Suggest five things to do at home with two children.",
    },
    "Code": {
        "Count words": "Write a Python function that takes a list of words and returns a dictionary from each word to "
        "how often it occurs. Add a docstring and show an example call.",
        "HTML page": "Write a small HTML page with a heading, a list of three fruits and a <style> block that colours "
        "the list green.",
    },
    "Maths": {
        "Train": "A train leaves at 9:40 and arrives at 13:10 after travelling 245 km. What is its average speed in "
        "km/h? Explain each step.",
        "Fences": "A garden is 12 m long and 8 m wide. How many metres of fence go around it, and what is its area?",
    },
    "Writing": {
        "Sea poem": "Write a short poem about the sea in winter.",
        "Email": "Write a polite email that moves a meeting from Monday to Thursday afternoon.",
    },
    "Summarise": {
        "Bees": "Summarise in two sentences: Honey bees tell each other where flowers are by dancing. The angle of the "
        "dance shows the direction relative to the sun, and the length of its run shows the distance. Other bees "
        "follow the dancer in the dark hive, feel her movements, and then fly out to the place she described.",
    },
    "Translate": {
        "French": "Translate into French: The library opens at nine and closes at half past six.",
    },
}
