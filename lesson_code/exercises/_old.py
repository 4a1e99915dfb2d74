"""Chapters that are declared in the former way, until they are converted."""

from lesson_code.exercises._declare import Exercise
from lesson_code.exercises._declare import Function as NewFunction
from lesson_code.exercises._declare import Value as NewValue


def Mistake(what, message, section):
    return what, message, section


def Further(check, section, inputs=None, options=None):
    return check, section, (options or {}) | ({"inputs": inputs} if inputs else {})


def Function(*, signature, reference, section, mistakes=(), further=(), **options):
    name = signature.partition("(")[0]
    part = NewFunction(name, reference, section, **options).mistakes(*mistakes)
    part.signature = signature
    for check, where, keywords in further:
        part.passes(check, where, **keywords)
    return part


def Value(*, name, reference, section, mistakes=(), **options):
    return NewValue(name, reference, section, **options).mistakes(*mistakes)


def truth(name, right, *, section, message, form="True or False"):
    return NewValue(name, right, section, form).mistakes((not right, message))


def chapter(title, *exercises):
    return {label: Exercise(label, title, parts) for label, *parts in exercises}
