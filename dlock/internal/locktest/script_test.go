package locktest_test

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/memlock"
)

const child = "LOCKTEST_SCRIPT"

// A failure names the line.
func TestScriptThatFails(t *testing.T) {
	for script, want := range map[string]string{
		"a try k => #1 | a acquire\nb try k => held | b acquire":                              "PASS",
		"a try k => #1 | a acquire\nb try k => #2 | b acquire\na release k => ok | a release": `(?s)script\.txt:5 .*got b try k     => held \| b acquire\s+want b try k     => #2`,
		"a try k => #1 | a 2*acquire":                                                         `script\.txt:4 `,
		"a try k => #1 | a acquire\na try k ten => #1":                                        `script\.txt:5\s`,
		"a try k => #1 | a acquire\n# A comment.\na fly k":                                    `script\.txt:6\s`,
		"a lose renew\na try k => #1 | a acquire\na heal":                                     `(?s)there was no renew to lose.*script\.txt:6\s`,
		"a try k => #1 | a acquire\na lose acquire\na try other => #1 | a acquire":            `(?s)script\.txt:6 .*a try other    => broken wire \| a acquire`,
		"a try k 1s => #1 | a acquire\nadvance 2s\nb try k => held | b acquire":               `(?s)script\.txt:6 .*b try k    => #2 \| b acquire`,
	} {
		out, passes, _ := runScript(t, script)
		require.Equal(t, want == "PASS", passes, "%s", out)
		require.Regexp(t, want, out)
	}
}

func TestUpdate(t *testing.T) {
	for script, want := range map[string]string{
		"a try k":                     "a try k => #1 | a acquire", // it shows nothing yet
		"a try k => #1 | a 2*acquire": "a try k => #1 | a acquire",
		"a try k => #2 | a acquire":   "", // results are never rewritten
	} {
		out, passes, after := runScript(t, script, "-update")
		require.Equal(t, want != "", passes, "%s", out)
		require.Equal(t, header+cmp.Or(want, script)+"\n", after)
	}
}

const header = "A comment.\n\n-- Name --\n"

func runScript(t *testing.T, script string, args ...string) (out string, passes bool, after string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "script.txt")
	require.NoError(t, os.WriteFile(file, []byte(header+script+"\n"), 0o600))
	cmd := exec.CommandContext(t.Context(), os.Args[0], append([]string{"-test.run=^TestChild$", "-test.v"}, args...)...)
	cmd.Env = append(os.Environ(), child+"="+file)
	b, err := cmd.CombinedOutput()
	text, rerr := os.ReadFile(file)
	require.NoError(t, rerr)
	return string(b), err == nil, string(text)
}

func TestChild(t *testing.T) {
	file := os.Getenv(child)
	if file == "" {
		t.Skip("not applicable alone: TestScriptThatFails runs it")
	}
	locktest.Scripts(t, file, true, func(*testing.T) locktest.Bench {
		b := memlock.New()
		return locktest.Bench{
			Key:  func(key string) string { return key },
			Open: func(w *locktest.Wire, _ ...string) dlock.Backend { return locktest.Wired(b.Client(), w) },
		}
	})
}
