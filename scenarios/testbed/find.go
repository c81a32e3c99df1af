package testbed

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// MissingError says that this machine lacks a type of server.
type MissingError struct {
	Server string // "ZooKeeper"
	Get    string // the shell command that provides it
	err    error
}

func (e *MissingError) Error() string { return e.err.Error() }
func (e *MissingError) Unwrap() error { return e.err }

// Strict reports whether [EnvStrict] is set.
func Strict() bool { return os.Getenv(EnvStrict) == "1" }

// Need ends a test if err is not nil: it skips it for a [MissingError], unless [Strict], and fails it otherwise.
func Need(t interface {
	Helper()
	Skipf(format string, args ...any)
	Fatal(args ...any)
}, err error,
) {
	t.Helper()
	missing, ok := errors.AsType[*MissingError](err)
	switch {
	case ok && !Strict():
		t.Skipf("no %s here: %s", missing.Server, missing.Get)
	case err != nil:
		t.Fatal(err)
	}
}

// Program returns an error, for [Need], if a program isn't in PATH; get is the command that installs it.
func Program(name, get string) error {
	_, err := exec.LookPath(name)
	if err != nil {
		err = &MissingError{name, get, fmt.Errorf("%w: %s", err, get)}
	}
	return err
}

func (t *serverType) missing(err error) error { return &MissingError{t.title, t.installCommand(), err} }

// Real returns an error, for [Need], if the server is an imitation.
func (s *Server) Real() error {
	return s.serverType.cannot(s.Provider, nil)
}

func (t *serverType) cannot(p Provider, err error) error {
	if p == Embedded {
		return t.missing(cmp.Or(err, errors.New("the "+t.title+" of this test is an imitation")))
	}
	return err
}

func (t *serverType) installCommand() string {
	if t.module != "" {
		return "make bin/" + t.program
	}
	if runtime.GOOS == "darwin" {
		return "brew install " + t.brew
	}
	return "sudo apt-get install " + t.apt
}

// find searches the environment, PATH, t.dirs and bin.
func (t *serverType) find(program string) (string, error) {
	env := t.env("SERVER")
	if set := os.Getenv(env); set != "" {
		if program != t.program {
			set = filepath.Join(filepath.Dir(set), program)
		}
		path, err := findProgram(set)
		if err != nil {
			err = fmt.Errorf("%s: %w", env, err)
		}
		return path, err
	}
	path, err := findProgram(program)
	if _, toolErr := findProgram(cmp.Or(t.tool, program)); err == nil && toolErr == nil {
		return path, nil
	}
	for _, dir := range t.dirs {
		all, _ := filepath.Glob(filepath.Join(dir, program))
		if len(all) > 0 {
			return slices.MaxFunc(all, func(a, b string) int { return cmp.Compare(number(a), number(b)) }), nil
		}
	}
	if t.module != "" {
		if path, err := findBuilt(program); err == nil {
			return path, nil
		}
	}
	return "", t.missing(fmt.Errorf("there is no %s: %s, or set %s to its path", program, t.installCommand(), env))
}

// number returns 15 for /usr/lib/postgresql/15/bin.
func number(path string) (n int) {
	for part := range strings.SplitSeq(path, "/") {
		v, _ := strconv.Atoi(part)
		n = cmp.Or(v, n)
	}
	return n
}

func findProgram(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", err
	}
	return filepath.Abs(path)
}

func findBuilt(name string) (string, error) {
	dir, err := os.Getwd()
	for err == nil {
		if _, statErr := os.Stat(filepath.Join(dir, "go.mod")); statErr == nil {
			return findProgram(filepath.Join(dir, "bin", name))
		}
		if dir == filepath.Dir(dir) {
			err = errors.New("there is no go.mod above the working directory")
		}
		dir = filepath.Dir(dir)
	}
	return "", err
}
