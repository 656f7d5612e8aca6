"""Templates written to escape, to linger or to eat memory."""

# ruff: noqa: E501 (a template reads best on one line)

from __future__ import annotations

_LOOP = "{% for i in range(100000) %}"
_DEEP = "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
_WORD = "{% set x = 'ab' * 400000 %}"

ENDLESS = {
    "a range nobody can walk": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": f"{_LOOP}{_LOOP}{_LOOP}{{% endfor %}}{{% endfor %}}{{% endfor %}}",
    "nested loops that filter everything out": f"{_LOOP}{{% for j in range(100000) if false %}}{{% endfor %}}{{% endfor %}}",
    "a macro that calls itself": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "two macros that fan out": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "lazy filters inside each other": f"{_LOOP}{{{{ range(100000) | map('string') | map('upper') | list | length }}}}{{% endfor %}}",
    "select with a test": f"{_LOOP}{{{{ range(100000) | select('odd') | list | length }}}}{{% endfor %}}",
    "equality of deep twins": _DEEP + "{{ ns.a == ns.b }}",
    "a deep twin in a list": _DEEP + "{{ ns.a in [ns.b] }}",
    "the eq test on deep twins": _DEEP + "{{ ns.a is eq ns.b }}",
    "sorting deep twins": _DEEP + "{{ [ns.a, ns.b] | sort | length }}",
    "a changed deep value": _DEEP + "{% for i in [ns.a, ns.b] %}{{ loop.changed(i) }}{% endfor %}",
    "hashing a deep tuple": "{% set ns = namespace(t=(1,)) %}{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ {ns.t: 1} }}",
    "indexing by a deep tuple": "{% set ns = namespace(t=(1,)) %}{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ {}[ns.t] }}",
    "a dict of deep tuples": "{% set ns = namespace(t=(1,)) %}{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ dict([(ns.t, 1)]) }}",
    "unique over deep tuples": "{% set ns = namespace(t=(1,)) %}{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ [ns.t] | unique | list }}",
    "stripping by a huge set": _WORD + "{{ x.strip('c' * 900000 + 'ab') }}",
    "trimming by a huge set": _WORD + "{{ x | trim('c' * 900000 + 'ab') }}",
    "a huge needle from the right": _WORD + "{{ x.rfind('b' + 'a' * 300000) }}",
    "many searches without a loop": _WORD + "{{ 'abababac' in x }}" * 1_500,
    "numbers that grow": "{% set ns = namespace(x=3) %}{% for i in range(100) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "a tower of powers": "{{ 10 ** (10 ** 8) }}",
    "rounding away a hundred million digits": "{{ 5 | round(-100000000) }}",
    "summing lists": "{{ ([[1]] * 10000) | sum(start=[]) }}",
}

GREEDY = {
    "a wide field behind a key with brackets": "{{ '%(a(b))99999999d' % {'a(b)': 1} }}",
    "a wide field behind a long key": "{{ ('%(' ~ 'a' * 100 ~ ')99999999d') % {'a' * 100: 1} }}",
    "a long repetition": "{{ 'a' * 10**9 }}",
    "a repetition from the left": "{{ 10**9 * 'a' }}",
    "a long list": "{{ [0] * 10**9 }}",
    "doubling by plus": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by tilde": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by join": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "doubling by a method": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ''.join([ns.x, ns.x]) %}{% endfor %}",
    "doubling by a block": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "doubling by a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = m(ns.x) %}{% endfor %}",
    "doubling by format": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "doubling by percent": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = '%(x)s%(x)s' % {'x': ns.x} %}{% endfor %}",
    "replace that multiplies": _WORD + "{{ x | replace('a', x) }}",
    "a replace method that multiplies": _WORD + "{{ x.replace('a', x) }}",
    "join with a long separator": _WORD + "{{ range(100000) | join(x) }}",
    "a join method with a long separator": _WORD + "{{ x.join(['a'] * 100000) }}",
    "a wide percent field": "{{ '%1000000000d' % 1 }}",
    "a computed percent field": "{{ '%*d' % (1000000000, 1) }}",
    "a wide precise field": "{{ '%.1000000000f' % 1.5 }}",
    "a wide format filter": "{{ '%1000000000d' | format(1) }}",
    "a wide format method": "{{ '{:1000000000}'.format(1) }}",
    "a computed format method": "{{ '{:{}}'.format(1, 1000000000) }}",
    "a wide indent": "{{ ('a\\n' * 1000) | indent(1000000000) }}",
    "an indent on every line": "{{ ('\\n' * 100000) | indent(10000, blank=true) }}",
    "padding": "{{ 'a'.ljust(1000000000) }}",
    "zeros": "{{ 'a'.zfill(1000000000) }}",
    "a batch filled up": "{{ [1] | batch(1000000000, 0) | list }}",
    "batches kept": "{% set ns = namespace(l=[]) %}"
    + _LOOP
    + "{% set ns.l = [ns.l, [1] | batch(100000, 0) | first] %}{% endfor %}",
    "endless slices": "{{ [1] | slice(1000000000) | list }}",
    "json indented far": "{{ {'a': [1]} | tojson(indent=1000000000) }}",
    "json of a deep value": _DEEP + "{{ ns.a | tojson }}",
    "text of a deep value": _DEEP + "{{ ns.a }}",
    "text of a namespace": _DEEP + "{{ ns }}",
    "a deep value joined to text": _DEEP + "{{ 'x' ~ ns.a }}",
    "a deep value as a string": _DEEP + "{{ ns.a | string | length }}",
    "a deep value upper-cased": _DEEP + "{{ ns.a | upper | length }}",
    "slices kept": _WORD + "{% set ns = namespace(l=[]) %}" + _LOOP + "{% set ns.l = [ns.l, x[1:]] %}{% endfor %}",
    "partitions kept": _WORD
    + "{% set ns = namespace(l=[]) %}"
    + _LOOP
    + "{% set ns.l = [ns.l, x.partition('b')] %}{% endfor %}",
    "splits kept": _WORD
    + "{% set ns = namespace(l=[]) %}"
    + _LOOP
    + "{% set ns.l = [ns.l, x.split('b')] %}{% endfor %}",
    "blocks kept": _WORD
    + "{% set ns = namespace(l=[]) %}"
    + _LOOP
    + "{% set y %}{{ x }}{% endset %}{% set ns.l = [ns.l, y] %}{% endfor %}",
    "namespaces kept": "{% set ns = namespace(l=none) %}"
    + _LOOP
    + _LOOP
    + "{% set ns.l = namespace(l=ns.l) %}{% endfor %}{% endfor %}",
    "a block of many copies": _WORD + "{% set y %}" + _LOOP + "{{ x }}{% endfor %}{% endset %}",
    "a block of many literals": "{% set y %}" + _LOOP + "x" * 60_000 + "{% endfor %}{% endset %}",
    "output without end": _WORD + _LOOP + "{{ x }}{% endfor %}",
    "bits to digits": "{{ ('1' * 900000) | int(0, 2) * 7 }}",
}

ESCAPES = {
    "the class of a string": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the class by subscript": "{{ ''['__class__'] }}",
    "the class by filter": "{{ '' | attr('__class__') }}",
    "the class by map": "{{ [''] | map(attribute='__class__') | list }}",
    "the class in a format field": "{{ '{0.__class__}'.format('') }}",
    "globals in a format field": "{{ '{0.__globals__}'.format(raise_exception) }}",
    "a format map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "a function's globals": "{{ raise_exception.__globals__ }}",
    "a macro's function": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "lipsum's globals": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "cycler's globals": "{{ cycler.__init__.__globals__.os }}",
    "joiner's globals": "{{ joiner.__init__.__globals__.os }}",
    "namespace's globals": "{{ namespace.__init__.__globals__.os }}",
    "a namespace's dunder": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "namespace with dunders": "{{ namespace(__class__=1).x }}",
    "the context behind self": "{{ self._TemplateReference__context }}",
    "self's class": "{{ self.__init__.__globals__ }}",
    "the loop's iterator": "{% for x in [1] %}{{ loop._iterator.__reduce__() }}{% endfor %}",
    "a generator's frame": "{{ ([1] | map('string')).gi_frame.f_globals }}",
    "a caught generator's code": "{{ ([1] | map('string')).gi_code }}",
    "importing": "{% import 'os' as os %}",
    "including": "{% include '/etc/passwd' %}",
    "extending": "{% extends '/etc/passwd' %}",
    "changing a message": "{% set _ = messages.append(1) %}",
    "clearing a message": "{{ messages[0].clear() }}",
    "updating a dict": "{{ {}.update(a=1) }}",
    "calling a class": "{{ ''.__class__('x') }}",
    "bytes": "{{ (5).to_bytes(100000000, 'big') }}",
    "encoding": "{{ 'a'.encode('utf-16') }}",
    "translate": "{{ 'a'.translate({97: 'b' * 100000}) }}",
    "a time format with a width": "{{ strftime_now('%1000000000Y') }}",
}
