package model

import (
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/history"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		require.NoError(t, os.WriteFile("testdata/"+file, []byte(got), 0o600))
	}
	want, err := os.ReadFile("testdata/" + file)
	require.NoError(t, err)
	require.Equal(t, string(want), got, "if it is right, -update records it")
}

func bounded(f history.Fencing, c Config) Config {
	c.Fencing, c.Workers, c.Grants, c.Writes = f, 3, 3, 2
	return c
}

func noLock(grants, writes int) Config {
	return Config{
		Fencing: history.FencingOn, Workers: 2, Grants: grants, Writes: writes,
		ReleaseAny: true, RenewAny: true, LateToken: true, Regress: true,
	}
}

const fencing = EntryLost | StaleWrite | Overtaken

// guards lists, for each guard, what its removal breaks, and (ok) what it doesn't.
var guards = []struct {
	name   string
	config Config
	looked Breach
	ok     bool
}{
	{"all guards", bounded(history.FencingOn, Config{}), ^Breach(0), true},
	{"all guards", Config{Fencing: history.FencingOn, Workers: 3, Grants: 4, Writes: 1}, ^Breach(0), true},
	{"fencing off", Config{Fencing: history.FencingOff, Workers: 2, Grants: 2, Writes: 1}, EntryLost, false},
	{"fencing off", bounded(history.FencingOff, Config{}), EntryLost, false},
	{"fencing on writes only", bounded(history.FencingWrites, Config{}), EntryLost, false},
	{"fencing on writes only", Config{Fencing: history.FencingWrites, Workers: 3, Grants: 3, Writes: 1}, StaleWrite | Overtaken | TwoHolders, true},
	{"the store accepts an equal fence", bounded(history.FencingOn, Config{AcceptEqual: true}), EntryLost | Overtaken, true},
	{"the store accepts an equal fence", bounded(history.FencingOn, Config{AcceptEqual: true}), StaleWrite, false},
	{"the store accepts an equal fence, and tokens regress", bounded(history.FencingOn, Config{AcceptEqual: true, Regress: true}), EntryLost, false},
	{"the store ignores seq", bounded(history.FencingOn, Config{IgnoreSeq: true}), EntryLost, false},
	{"the store refuses no fenced read", bounded(history.FencingOn, Config{StaleReads: true}), StaleWrite, false},
	{"the fence is not durable", bounded(history.FencingOn, Config{ForgetFence: true}), EntryLost, false},
	{"release without owner", bounded(history.FencingOn, Config{ReleaseAny: true}), fencing, true},
	{"release without owner", bounded(history.FencingOn, Config{ReleaseAny: true}), TwoHolders, false},
	{"renew without owner", bounded(history.FencingOn, Config{RenewAny: true}), fencing, true},
	{"renew without owner", bounded(history.FencingOn, Config{RenewAny: true}), TwoHolders, false},
	{"token read after the grant", bounded(history.FencingOn, Config{LateToken: true}), Overtaken, false},
	{"tokens regress", bounded(history.FencingOn, Config{Regress: true}), Overtaken, false},
	{"a lock without any guard", noLock(3, 1), EntryLost | StaleWrite, true},
	{"a lock without any guard", noLock(2, 2), EntryLost | StaleWrite, true},
}

// States that differ in anything are different: with a field missing, Check would pass over states.
func TestKeyHasEveryField(t *testing.T) {
	s := State{Workers: [MaxWorkers]Worker{{Phase: Ready}}, Sent: []Write{{}}}
	known := map[string]string{s.key(true): "nothing"}
	differ := func(what string) {
		key := s.key(true)
		require.Empty(t, known[key], "%s isn't in the key", what)
		known[key] = what
	}
	var walk func(what string, v reflect.Value)
	walk = func(what string, v reflect.Value) {
		was := reflect.New(v.Type()).Elem()
		was.Set(v)
		defer func() { v.Set(was) }()
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				walk(what+"."+v.Type().Field(i).Name, v.Field(i))
			}
			return
		case reflect.Array, reflect.Slice:
			walk(what, v.Index(0)) // the other workers are idle
			return
		case reflect.String:
			v.SetString("a1")
		case reflect.Bool:
			v.SetBool(true)
		case reflect.Uint8:
			v.SetUint(v.Uint() + 1)
		default:
			v.SetInt(1)
		}
		differ(what)
	}
	walk("State", reflect.ValueOf(&s).Elem())
	require.NotEqual(t, pack(nil, "", 'a'), pack(nil, "a"), "pack is unambiguous")
}

func TestGuards(t *testing.T) {
	var b strings.Builder
	total, start := 0, time.Now()
	for _, g := range guards {
		states, shortest := g.config.Check(g.looked, false)
		total += states
		require.Equal(t, g.ok, shortest == nil, "%s: %v: %v", g.name, g.looked, shortest)
		fmt.Fprintf(&b, "== %s: ", g.name)
		if g.ok {
			fmt.Fprintf(&b, "never in %d states (workers: %d, grants: %d, writes under each: %d): %v\n\n",
				states, g.config.Workers, g.config.Grants, g.config.Writes, g.looked&(fencing|TwoHolders))
			continue
		}
		more, distinct := g.config.Check(g.looked, true)
		total += more
		require.Len(t, distinct, len(shortest), "symmetry hides a shorter way")
		fmt.Fprintf(&b, "%v\n", g.looked)
		for i, step := range shortest {
			fmt.Fprintf(&b, "%2d. %v\n", i+1, step)
		}
		b.WriteString("\n")
	}
	took := time.Since(start)
	t.Logf("%d states in %v: %.0f a second", total, took.Round(time.Millisecond), float64(total)/took.Seconds())
	golden(t, "guards.txt", b.String())
}
