/* The module `kvparams.native._native`: what is done for each byte of a request, for the ordinary form of it.
 *
 * Every function returns None for anything out of the ordinary, and the Python code that it stands for does the work
 * then. So this code decides nothing: it must only be right about what is ordinary. */
#include "native.h"

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    FUNCTION(are_within),
    FUNCTION(copy_values),
    FUNCTION(edit_members),
    FUNCTION(fill_line),
    FUNCTION(gather_pages),
    FUNCTION(member_spans),
    FUNCTION(pack_numbers),
    FUNCTION(read_chunks),
    FUNCTION(request_head),
    FUNCTION(response_head),
    FUNCTION(scatter_pages),
    FUNCTION(write_object),
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kvparams.native._native", NULL, 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
