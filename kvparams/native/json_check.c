/* Judges values that were parsed from JSON. */
#include "native.h"
#include <limits.h>

/* has_form(members: dict, form: tuple) -> bool
 *
 * Whether an object has exactly the members of the form, in this order. Each is a tuple: the name, the type of the value,
 * and the value, or Ellipsis where that does not matter. */
PyObject *has_form(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *name, *value;
    Py_ssize_t position = 0;
    (void)module;
    if (!has_arguments(count, 2))
        return NULL;
    if (!PyDict_Check(args[0]) || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "a dictionary and a tuple are needed");
        return NULL;
    }
    Py_ssize_t number = PyTuple_Size(args[1]);
    if (PyDict_Size(args[0]) != number)
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < number && PyDict_Next(args[0], &position, &name, &value); i++) {
        PyObject *member = PyTuple_GetItem(args[1], i);
        if (!PyTuple_Check(member) || PyTuple_Size(member) != 3) {
            PyErr_SetString(PyExc_TypeError, "a member of the form is a tuple of three");
            return NULL;
        }
        if ((PyObject *)Py_TYPE(value) != PyTuple_GetItem(member, 1))
            Py_RETURN_FALSE;
        int is_equal = PyObject_RichCompareBool(name, PyTuple_GetItem(member, 0), Py_EQ);
        PyObject *wanted = PyTuple_GetItem(member, 2);
        if (is_equal == 1 && wanted != Py_Ellipsis)
            is_equal = PyObject_RichCompareBool(value, wanted, Py_EQ);
        if (is_equal < 0)
            return NULL;
        if (is_equal == 0)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* are_within(values: list, low: int, high: int) -> bool
 *
 * Whether all values are whole numbers from `low` to `high` that fit into 64 bits, and no booleans. */
PyObject *are_within(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (!has_arguments(count, 3))
        return NULL;
    int below, above; /* of a bound that is beyond 64 bits */
    long long low = PyLong_AsLongLongAndOverflow(args[1], &below), high = PyLong_AsLongLongAndOverflow(args[2], &above);
    if (PyErr_Occurred())
        return NULL;
    if (below < 0)
        low = LLONG_MIN;
    if (above > 0)
        high = LLONG_MAX;
    if (!PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "the first argument must be a list");
        return NULL;
    }
    bool is_within = true;
    for (Py_ssize_t i = 0; is_within && i < PyList_Size(args[0]); i++) {
        PyObject *value = PyList_GetItem(args[0], i);
        int overflow = 1;
        long long number = PyLong_CheckExact(value) ? PyLong_AsLongLongAndOverflow(value, &overflow) : 0;
        is_within = overflow == 0 && number >= low && number <= high;
    }
    return PyBool_FromLong(is_within);
}
