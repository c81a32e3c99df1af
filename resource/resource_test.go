package resource_test

import (
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
)

func TestFenceOrder(t *testing.T) {
	ascending := []resource.Fence{{}, {0, 1}, {1, 0}, {1, 1}, {1, 2}, {1, math.MaxUint64}, {2, 0}, {2, 1}, {1 << 63, 1}, {math.MaxUint64, 1}}
	for i, f := range ascending {
		for j, g := range ascending {
			want := min(max(i-j, -1), 1)
			require.Equal(t, want, f.Compare(g), "%v to %v", f, g)
			require.Equal(t, ascending[max(i, j)], f.Max(g), "%v and %v", f, g)
			require.Equal(t, i > j, resource.AdmitsWrite(g, f), "write at %v after %v", f, g)
			require.Equal(t, i >= j || f.Seq == 0 && f.Token == g.Token, resource.AdmitsRead(g, f), "read at %v after %v", f, g)
		}
	}
}

func TestParseFence(t *testing.T) {
	require.Equal(t, resource.Fence{Token: 7, Seq: 2}, resource.NewFence(7, 2))
	for s, want := range map[string]resource.Fence{
		"7": {7, 1}, "7.0": {7, 0}, "7.2": {7, 2}, "0.0": {}, "18446744073709551615.18446744073709551615": {math.MaxUint64, math.MaxUint64},
	} {
		f, err := resource.ParseFence(s)
		require.NoError(t, err, s)
		require.Equal(t, want, f, s)
		require.Equal(t, s, f.String())
	}
	for _, s := range []string{"", ".", "7.", ".7", "-1", "+1", "7.-1", " 7", "7 ", "1_0", "0x7", "7.1.2", "18446744073709551616", "7e1", "٧"} {
		_, err := resource.ParseFence(s)
		require.Error(t, err, s)
	}
}

func FuzzParseFence(f *testing.F) {
	for _, s := range []string{"7", "7.0", "007.01", "18446744073709551615.1", "-1", "7.", "1.2.3"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := resource.ParseFence(s)
		if err != nil {
			return
		}
		if strings.Trim(s, "0123456789.") != "" {
			t.Errorf("ParseFence(%q) took it for %v", s, got)
		}
		if again, err := resource.ParseFence(got.String()); err != nil || again != got {
			t.Errorf("ParseFence(%q): got %v, %v, want %v", got, again, err, got)
		}
	})
}

func TestStaleTokenError(t *testing.T) {
	err := &resource.StaleTokenError{Key: "k", Seen: resource.Fence{Token: 9, Seq: 2}, Got: resource.Fence{Token: 7, Seq: 1}}
	require.EqualError(t, err, `resource: stale fencing token for "k": seen 9, got 7`)
	require.NotErrorIs(t, err, resource.ErrApplied)
	err.Applied = true
	require.EqualError(t, err, `resource: stale fencing token for "k": seen 9, got 7 (already applied)`)
	require.ErrorIs(t, err, resource.ErrApplied)
	require.NotErrorIs(t, err, resource.ErrNotFound)
	err = &resource.StaleTokenError{Key: "k", Seen: resource.Fence{Token: 7, Seq: 1}, Got: resource.Fence{Token: 7, Seq: 1}}
	require.EqualError(t, err, `resource: stale fence for "k": seen 7, got 7: another call used this token and Seq, and each call needs its own; `+
		"if it wasn't of this grant, two holders have the same token, since the lock service has lost data")
	err.Applied = true
	require.EqualError(t, err, `resource: stale fence for "k": seen 7, got 7 (already applied)`)
	err = &resource.StaleTokenError{Key: "acme's", Seen: resource.Fence{Token: math.MaxUint64, Seq: 1}, Got: resource.Fence{Token: 7, Seq: 1}}
	require.EqualError(t, err, `resource: stale fencing token for "acme's": seen 18446744073709551615, got 7: `+
		`if no lock has granted 18446744073709551615, stop all holders and lower the fence: fencelab fence set -force STORE-URL 'acme'\''s' 7, `+
		`or for cmd/resource, with the server stopped: resource -file FILE -set-fence 'acme'\''s=7'`)
	err.Seen.Token = 1<<53 - 1 // a lock's last
	require.EqualError(t, err, `resource: stale fencing token for "acme's": seen 9007199254740991, got 7`)
	err.Seen.Token, err.Got.Token = math.MaxUint64, 1<<53 // of a lock without that limit
	require.EqualError(t, err, `resource: stale fencing token for "acme's": seen 18446744073709551615, got 9007199254740992`)
}

// A key that was never written has no write to repeat.
func TestCheckWriteOfUnwritten(t *testing.T) {
	f := resource.Fence{Token: 7, Seq: 1}
	require.Equal(t, &resource.StaleTokenError{Key: "k", Seen: f, Got: f}, resource.Record{MaxFence: f}.CheckWrite("k", f, nil))
}
