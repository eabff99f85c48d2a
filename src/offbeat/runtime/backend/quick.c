/* The fast path to a collective that was compiled before: looked up and started without the interpreter.
 *
 * An extension module of Python's stable ABI (3.11 on). It reads tensors through their Python methods, so that no torch
 * headers are needed, and calls the library of native.c by its address.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

#define VERSION 3
enum { MOST = 33, REDUCES = 1, ROOTED = 2 };

typedef int64_t (*start_t)(void *, void *const *, int64_t);

/* Attributes of options, tensors and plans. */
enum { ASYNC, OPERATION, ROOT, CPU, LAYOUT, CONTIGUOUS, NEGATED, ADDRESS, COUNT, KIND, PLACE, BYTES, NAMES };
static const char *const WORDS[NAMES] = {
    "asyncOp",       "reduceOp", "rootRank", "is_cpu", "layout", "is_contiguous",
    "is_neg",        "data_ptr", "numel",    "dtype",  "address", "nbytes",
};
static PyObject *names[NAMES];

/* Everything that does not change from call to call, in the order of the constructor's arguments. */
enum { PLANS, QUEUE, ACQUIRE, RELEASE, DONE, TENSOR, STRIDED, PROFILING, TURNS, LOOK, DEVICES, THINGS };
typedef struct {
    PyObject_HEAD
    PyObject *things[THINGS];
    start_t start;
    long long asked, large;
} quick_t;

/* The tensors of a call, in the order of its arguments. */
typedef struct {
    PyObject *tensors[MOST];
    void *addresses[MOST];
    Py_ssize_t bytes[MOST];
    Py_ssize_t count;
} operands_t;

/* Whether a value is this very object; steals the reference to it. -1: an error is set. */
static int is(PyObject *value, PyObject *expected) {
    if (!value) return -1;
    Py_DECREF(value);
    return value == expected;
}

/* Collect a tensor, or the tensors of a list or of a list of lists; None adds nothing. */
static int collected(quick_t *self, PyObject *argument, operands_t *operands) {
    if (argument == Py_None) return 1;
    if ((PyObject *)Py_TYPE(argument) == self->things[TENSOR]) {
        if (operands->count == MOST) return 0;
        operands->tensors[operands->count++] = argument;
        return 1;
    }
    if (!PyList_CheckExact(argument)) return 0;
    for (Py_ssize_t i = 0, n = PyList_Size(argument); i < n; i++)
        if (!collected(self, PyList_GetItem(argument, i), operands)) return 0;
    return 1;
}

/* Whether a tensor is an ordinary one: contiguous, on the CPU. */
static int usual(quick_t *self, PyObject *tensor) {
    PyObject **things = self->things;
    int good;
    /* Without devices, data is in main memory, or nowhere. */
    if (things[DEVICES] != Py_False && (good = is(PyObject_GetAttr(tensor, names[CPU]), Py_True)) != 1) return good;
    if ((good = is(PyObject_GetAttr(tensor, names[LAYOUT]), things[STRIDED])) != 1) return good;
    if ((good = is(PyObject_CallMethodObjArgs(tensor, names[CONTIGUOUS], NULL), Py_True)) != 1) return good;
    return is(PyObject_CallMethodObjArgs(tensor, names[NEGATED], NULL), Py_False);
}

/* The number in an object, whose reference is stolen; -1 with an error set if there is none. */
static Py_ssize_t number_from(PyObject *given) {
    Py_ssize_t number = given ? PyLong_AsSsize_t(given) : -1;
    Py_XDECREF(given);
    return number;
}

/* Root and reduction of a call as one number; -1 with an error set. */
static Py_ssize_t detail_of(PyObject *options, long flags) {
    Py_ssize_t root = 0, operation = 0;
    if (flags & ROOTED && (root = number_from(PyObject_GetAttr(options, names[ROOT]))) < 0) return -1;
    if (flags & REDUCES) {
        PyObject *reduction = PyObject_GetAttr(options, names[OPERATION]);
        if (!reduction) return -1;
        operation = PyObject_Hash(reduction); /* Its hash is its number. */
        Py_DECREF(reduction);
    }
    return root << 8 | operation;
}

/* The key of a plan: the collective, root and reduction, dtype, and the counts of all tensors. NULL without an error:
 * tensors of different dtypes. */
static PyObject *key_of(PyObject *kind, Py_ssize_t detail, operands_t *operands) {
    PyObject *key = PyTuple_New(3 + operands->count), *dtype = NULL;
    if (!key) return NULL;
    PyTuple_SetItem(key, 0, Py_NewRef(kind));
    PyTuple_SetItem(key, 1, PyLong_FromSsize_t(detail));
    for (Py_ssize_t i = 0; i < operands->count; i++) {
        PyObject *count = PyObject_CallMethodObjArgs(operands->tensors[i], names[COUNT], NULL);
        PyObject *type = PyObject_GetAttr(operands->tensors[i], names[KIND]);
        int same = count && type && (!i || type == dtype);
        Py_XDECREF(type); /* Torch keeps its dtypes forever. */
        dtype = type;
        if (!same) {
            Py_XDECREF(count);
            Py_DECREF(key);
            return NULL;
        }
        PyTuple_SetItem(key, 3 + i, count);
    }
    PyTuple_SetItem(key, 2, Py_NewRef(dtype ? dtype : Py_None));
    return key;
}

/* Where tensors lie. 0: one has no address, or shares memory with the first or the last; -1: an error is set. */
static int placed(operands_t *operands) {
    Py_ssize_t last = operands->count - 1;
    for (Py_ssize_t i = 0; i <= last; i++) {
        PyObject *tensor = operands->tensors[i], *given = PyObject_CallMethodObjArgs(tensor, names[ADDRESS], NULL);
        operands->addresses[i] = given ? PyLong_AsVoidPtr(given) : NULL;
        Py_XDECREF(given);
        if (PyErr_Occurred()) return -1;
        if (last && (operands->bytes[i] = number_from(PyObject_GetAttr(tensor, names[BYTES]))) < 0) return -1;
        /* Data without an address, because there is none or it was freed, is left to the interpreter. */
        if (!operands->addresses[i] && (!last || operands->bytes[i])) return 0;
    }
    for (Py_ssize_t i = 0; i <= last; i++)
        for (int end = 0; end < 2; end++) {
            Py_ssize_t j = end ? last : 0;
            char *a = operands->addresses[i], *b = operands->addresses[j];
            if (i != j && a < b + operands->bytes[j] && b < a + operands->bytes[i]) return 0;
        }
    return 1;
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

/* Start a compiled operation; the caller holds the turn. */
static PyObject *begun(quick_t *self, PyObject *plan, operands_t *operands) {
    PyObject *released, *given = PyObject_GetAttr(plan, names[PLACE]);
    void *address = given ? PyLong_AsVoidPtr(given) : NULL;
    int64_t code;
    Py_XDECREF(given);
    if (address) {
        PyThreadState *state = PyEval_SaveThread();
        code = self->start(address, operands->addresses, operands->count);
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

/* begin(kind, flags, options, outputs, inputs); see Unbegun.begin. */
static PyObject *quick_begin(PyObject *own, PyObject *const *arguments, Py_ssize_t given) {
    quick_t *self = (quick_t *)own;
    PyObject **things = self->things, *options, *key, *plan, *result;
    operands_t operands;
    Py_ssize_t waiting, detail;
    int good;
    if (given != 5) return PyErr_Format(PyExc_TypeError, "five arguments are needed, got %zd", given);
    operands.count = 0;
    options = arguments[2];
    if (options == Py_None || !collected(self, arguments[3], &operands) || !collected(self, arguments[4], &operands))
        Py_RETURN_NONE;
    good = is(PyObject_GetAttr(options, names[ASYNC]), Py_False);
    if (good < 0) PyErr_Clear(); /* Not options at all. */
    if (good != 1) Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < operands.count; i++)
        if ((good = usual(self, operands.tensors[i])) != 1) return good ? NULL : Py_NewRef(Py_None);
    if ((good = is(PyObject_CallNoArgs(things[PROFILING]), Py_False)) != 1) return good ? NULL : Py_NewRef(Py_None);
    if ((detail = detail_of(options, PyLong_AsLong(arguments[1]))) < 0) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    if (!(key = key_of(arguments[0], detail, &operands))) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    plan = PyDict_GetItemWithError(things[PLANS], key);
    if (!plan || (PyObject *)Py_TYPE(plan) != things[TURNS]) {
        Py_DECREF(key);
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    Py_INCREF(plan); /* Other threads may run from here on. */
    waiting = PyObject_Size(things[QUEUE]);
    good = waiting < 0 ? -1 : waiting == 0;
    if (good == 1 && operands.count && !looked(self, PyLong_AsSsize_t(PyTuple_GetItem(key, 3)))) good = -1;
    Py_DECREF(key);
    if (good == 1) good = placed(&operands);
    if (good == 1) good = is(PyObject_CallFunctionObjArgs(things[ACQUIRE], Py_False, NULL), Py_True);
    result = good == 1 ? begun(self, plan, &operands) : good ? NULL : Py_NewRef(Py_None);
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
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOOOO", things + PLANS, things + QUEUE, things + ACQUIRE, things + RELEASE,
                          things + DONE, things + TENSOR, things + STRIDED, things + PROFILING, things + TURNS,
                          things + LOOK, things + DEVICES, &address))
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
    {"asked", quick_asked, NULL, "How many collectives were begun.", NULL},
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
