/* The fast path to an all-reduce that was compiled before: looked up and started without the interpreter.
 *
 * An extension module of Python's stable ABI (3.11 on). It reads the tensor through its Python methods, so that no torch
 * headers are needed, and calls the library of native.c by its address.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

#define VERSION 2

typedef int64_t (*start_t)(void *, void *);

/* Attributes of options, tensors and plans. */
enum { ASYNC, OPERATION, CPU, LAYOUT, CONTIGUOUS, NEGATED, ADDRESS, COUNT, KIND, PLACE, NAMES };
static const char *const WORDS[NAMES] = {
    "asyncOp", "reduceOp", "is_cpu", "layout", "is_contiguous", "is_neg", "data_ptr", "numel", "dtype", "address",
};
static PyObject *names[NAMES];

/* Everything that does not change from call to call, in the order of the constructor's arguments. */
enum { PLANS, QUEUE, ACQUIRE, RELEASE, DONE, OPTIONS, TENSOR, STRIDED, PROFILING, TURNS, LOOK, DEVICES, THINGS };
typedef struct {
    PyObject_HEAD
    PyObject *things[THINGS];
    start_t start;
    long long asked, large;
} quick_t;

/* Whether a value is this very object; steals the reference to it. -1: an error is set. */
static int is(PyObject *value, PyObject *expected) {
    if (!value) return -1;
    Py_DECREF(value);
    return value == expected;
}

/* Whether it is an ordinary call: one contiguous CPU tensor, synchronous, and not profiled. */
static int usual(quick_t *self, PyObject *tensors, PyObject *options) {
    PyObject **things = self->things, *tensor;
    int good;
    if ((PyObject *)Py_TYPE(options) != things[OPTIONS] || !PyList_CheckExact(tensors) || PyList_Size(tensors) != 1)
        return 0;
    tensor = PyList_GetItem(tensors, 0);
    if ((PyObject *)Py_TYPE(tensor) != things[TENSOR]) return 0;
    if ((good = is(PyObject_GetAttr(options, names[ASYNC]), Py_False)) != 1) return good;
    /* Without devices, data is in main memory, or nowhere. */
    if (things[DEVICES] != Py_False && (good = is(PyObject_GetAttr(tensor, names[CPU]), Py_True)) != 1) return good;
    if ((good = is(PyObject_GetAttr(tensor, names[LAYOUT]), things[STRIDED])) != 1) return good;
    if ((good = is(PyObject_CallMethodObjArgs(tensor, names[CONTIGUOUS], NULL), Py_True)) != 1) return good;
    if ((good = is(PyObject_CallMethodObjArgs(tensor, names[NEGATED], NULL), Py_False)) != 1) return good;
    return is(PyObject_CallNoArgs(things[PROFILING]), Py_False);
}

/* The key of a plan: count, dtype and operation. */
static PyObject *key_of(PyObject *tensor, PyObject *options, Py_ssize_t *count) {
    PyObject *parts[3] = {
        PyObject_CallMethodObjArgs(tensor, names[COUNT], NULL),
        PyObject_GetAttr(tensor, names[KIND]),
        NULL,
    };
    PyObject *operation = PyObject_GetAttr(options, names[OPERATION]), *key = NULL;
    if (operation) parts[2] = PyLong_FromSsize_t(PyObject_Hash(operation)); /* Its hash is its number. */
    if (parts[0] && parts[1] && parts[2]) key = PyTuple_Pack(3, parts[0], parts[1], parts[2]);
    if (key) *count = PyLong_AsSsize_t(parts[0]);
    for (int i = 0; i < 3; i++) Py_XDECREF(parts[i]);
    Py_XDECREF(operation);
    return key;
}

/* For every 64th large one, check how much memory this process keeps free. False: an error is set. */
static int looked(quick_t *self, Py_ssize_t count) {
    enum { LARGE = 4096, OFTEN = 64 };
    PyObject *done;
    if (count < LARGE || ++self->large % OFTEN) return 1;
    if (!(done = PyObject_CallNoArgs(self->things[LOOK]))) return 0;
    Py_DECREF(done);
    return 1;
}

/* The address in an object, whose reference is stolen; NULL with an error set if there is none. */
static void *address_from(PyObject *given) {
    void *address = given ? PyLong_AsVoidPtr(given) : NULL;
    Py_XDECREF(given);
    return address;
}

/* Start a compiled operation; the caller holds the turn. */
static PyObject *begun(quick_t *self, PyObject *plan, void *first) {
    PyObject *released;
    void *address = address_from(PyObject_GetAttr(plan, names[PLACE]));
    int64_t code;
    if (address) {
        PyThreadState *state = PyEval_SaveThread();
        code = self->start(address, first);
        PyEval_RestoreThread(state);
        self->asked++;
        if (code) return Py_BuildValue("(OL)", plan, (long long)code);
    }
    released = PyObject_CallNoArgs(self->things[RELEASE]);
    if (!released || !address) {
        Py_XDECREF(released);
        return NULL;
    }
    Py_DECREF(released);
    return Py_NewRef(self->things[DONE]);
}

static PyObject *quick_begin(PyObject *own, PyObject *const *arguments, Py_ssize_t given) {
    quick_t *self = (quick_t *)own;
    PyObject **things = self->things, *tensor, *key, *plan, *result;
    Py_ssize_t waiting, count;
    void *first;
    int good;
    if (given != 2) return PyErr_Format(PyExc_TypeError, "tensors and options are needed, got %zd arguments", given);
    if ((good = usual(self, arguments[0], arguments[1])) != 1) return good ? NULL : Py_NewRef(Py_None);
    tensor = PyList_GetItem(arguments[0], 0);
    if (!(key = key_of(tensor, arguments[1], &count))) return NULL;
    plan = PyDict_GetItemWithError(things[PLANS], key);
    Py_DECREF(key);
    if (!plan && PyErr_Occurred()) return NULL;
    if (!plan || (PyObject *)Py_TYPE(plan) != things[TURNS]) Py_RETURN_NONE;
    if ((waiting = PyObject_Size(things[QUEUE])) != 0) return waiting < 0 ? NULL : Py_NewRef(Py_None);
    Py_INCREF(plan); /* Other threads may run from here on. */
    first = looked(self, count) ? address_from(PyObject_CallMethodObjArgs(tensor, names[ADDRESS], NULL)) : NULL;
    /* Data without an address, because there is none or it was freed, is left to the interpreter. */
    good = first ? is(PyObject_CallFunctionObjArgs(things[ACQUIRE], Py_False, NULL), Py_True) : PyErr_Occurred() ? -1 : 0;
    result = good == 1 ? begun(self, plan, first) : good ? NULL : Py_NewRef(Py_None);
    Py_DECREF(plan);
    return result;
}

static PyObject *quick_asked(PyObject *own, void *nothing) {
    (void)nothing;
    return PyLong_FromLongLong(((quick_t *)own)->asked);
}

static PyObject *quick_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *things[THINGS], *address;
    quick_t *self;
    (void)keywords;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOOOOO", things + PLANS, things + QUEUE, things + ACQUIRE, things + RELEASE,
                          things + DONE, things + OPTIONS, things + TENSOR, things + STRIDED, things + PROFILING,
                          things + TURNS, things + LOOK, things + DEVICES, &address))
        return NULL;
    if (!PyDict_Check(things[PLANS])) return PyErr_Format(PyExc_TypeError, "plans must be a dictionary");
    void *start = PyLong_AsVoidPtr(address);
    if (!start || !(self = (quick_t *)PyType_GenericAlloc(type, 0))) return NULL;
    for (int i = 0; i < THINGS; i++) self->things[i] = Py_NewRef(things[i]);
    self->start = (start_t)start;
    return (PyObject *)self;
}

static int quick_traverse(PyObject *own, visitproc visit, void *arg) {
    for (int i = 0; i < THINGS; i++) Py_VISIT(((quick_t *)own)->things[i]);
    Py_VISIT(Py_TYPE(own));
    return 0;
}

static int quick_clear(PyObject *own) {
    for (int i = 0; i < THINGS; i++) Py_CLEAR(((quick_t *)own)->things[i]);
    return 0;
}

static void quick_dealloc(PyObject *own) {
    PyTypeObject *type = Py_TYPE(own);
    PyObject_GC_UnTrack(own);
    quick_clear(own);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(own);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"begin", (PyCFunction)(void (*)(void))quick_begin, METH_FASTCALL, "As Quick.begin."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef properties[] = {
    {"asked", quick_asked, NULL, "How many all-reduces were begun.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, quick_new},         {Py_tp_methods, methods}, {Py_tp_getset, properties},
    {Py_tp_traverse, quick_traverse}, {Py_tp_clear, quick_clear}, {Py_tp_dealloc, quick_dealloc},
    {0, NULL},
};
static PyType_Spec spec = {"offbeat.runtime.backend._quicker.Quicker", sizeof(quick_t), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_quicker", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__quicker(void) {
    PyObject *module = PyModule_Create(&definition), *type;
    if (!module) return NULL;
    for (int i = 0; i < NAMES; i++)
        if (!(names[i] = PyUnicode_InternFromString(WORDS[i]))) goto failed;
    if (!(type = PyType_FromSpec(&spec))) goto failed;
    if (PyModule_AddObject(module, "Quicker", type) < 0) {
        Py_DECREF(type);
        goto failed;
    }
    if (PyModule_AddIntConstant(module, "VERSION", VERSION) < 0) goto failed;
    return module;
failed:
    Py_DECREF(module);
    return NULL;
}
