/* What the parts of the extension share. Only the stable ABI of CPython 3.11 is used, so one build serves all later
 * versions. */
#ifndef KVPARAMS_NATIVE_H
#define KVPARAMS_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Text that belongs to somebody else. */
typedef struct {
    const char *at;
    Py_ssize_t size;
} Slice;

/* The functions of the module; each source file says what they do. */
PyObject *member_spans(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *edit_members(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pack_numbers(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *write_object(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *fill_line(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *are_within(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *request_head(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *response_head(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *read_chunks(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *copy_values(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *gather_pages(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *scatter_pages(PyObject *module, PyObject *const *args, Py_ssize_t count);

/* Returns false, with an exception set, unless a function got so many arguments. */
static inline bool has_arguments(Py_ssize_t count, Py_ssize_t wanted) {
    if (count != wanted)
        PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", wanted, count);
    return count == wanted;
}

/* Returns the position behind white space of JSON. */
static inline const char *skip_space(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

#endif
