package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/fencelab/fencelab"

func told(t *testing.T, started string, lines ...string) (printed, table string, s *summary) {
	t.Helper()
	var out, end strings.Builder
	s = &summary{output: map[string][]string{}, skips: map[string]map[string]int{}}
	require.NoError(t, s.read(strings.NewReader(strings.Join(lines, "\n")), &out))
	s.table(&end, started)
	return out.String(), end.String(), s
}

func line(action, pkg, test, output string) string {
	return `{"Action":"` + action + `","Package":"` + module + "/" + pkg + `","Test":"` + test + `","Output":"` + output + `"}`
}

func TestSummary(t *testing.T) {
	wd, err := os.Getwd()
	require.NoError(t, err)
	printed, table, s := told(t, wd+"/locks\tredis 7 (local)\n"+wd+"/locks\tredis 7 (local)\n",
		"# the compiler says this",
		line("output", "locks", "TestGood", `=== RUN TestGood\n`),
		line("output", "locks", "TestGood", `a good test's diary\n`),
		line("pass", "locks", "TestGood", ""),
		line("output", "locks", "TestSkipped", `    x_test.go:1: no etcd here: make bin/etcd\n`),
		line("skip", "locks", "TestSkipped", ""),
		line("output", "locks", "TestKit", `    z.go:3: Harness.Reopen is nil: the store is not said to be durable\n`),
		line("skip", "locks", "TestKit", ""),
		line("output", "locks", "", `ok  \tlocks\t1s\n`),
		line("pass", "locks", "", ""),
		line("output", "bad", "TestBad", `    y_test.go:2: it is broken\n`),
		line("fail", "bad", "TestBad", ""),
		line("output", "bad", "TestCut", `panic: test timed out\n`),
		line("output", "bad", "", `FAIL\tbad\t1s\n`),
		line("fail", "bad", "", ""),
		line("output", "none", "", `no tests were run: no Consul here: make bin/consul\n`),
		line("output", "none", "", `ok  \tnone\t0s\n`),
		line("pass", "none", "", ""),
	)
	require.Equal(t, strings.Join([]string{
		"# the compiler says this", "ok  \tlocks\t1s", "    y_test.go:2: it is broken", "FAIL\tbad\t1s", "panic: test timed out", "did not run\tnone\t0s", "",
	}, "\n"), printed)
	require.Equal(t, `
package                  ran on; − did not run
locks                    redis 7 (local)
                         − 1 tests: no etcd here: make bin/etcd
none                     no server
                         − all tests: no Consul here: make bin/consul
2 tests ran, 1 did not
`, table)
	require.Equal(t, []string{"ran " + module + "/locks TestGood", "skipped " + module + "/locks TestSkipped", "ran " + module + "/bad TestBad"}, s.ran)
}

func TestNever(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ran")
	require.ErrorContains(t, never([]string{"-never", file}, nil), "no such file")
	require.NoError(t, appendTo(file, []string{"ran a TestA", "skipped a TestB"}))
	require.EqualError(t, never([]string{"-never", file}, nil), "1 tests ran; these were skipped in every run:\n  a TestB")
	require.NoError(t, appendTo(file, []string{"ran a TestB"}))
	var out strings.Builder
	require.NoError(t, never([]string{"-never", file}, &out))
	require.Equal(t, "2 tests ran, each in at least one run\n", out.String())
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.Error(t, never([]string{"-never", file}, nil), "of no test it is known that it ran")
}
