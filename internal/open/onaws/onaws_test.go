package onaws_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/open/onaws"
)

// alone hides the environment's credentials from a test.
func alone(t *testing.T) {
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"} {
		t.Setenv(name, "")
	}
	dir := t.TempDir()
	t.Setenv("AWS_CONFIG_FILE", filepath.Join(dir, "config"))
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", filepath.Join(dir, "credentials"))
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	for _, name := range []string{
		"AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN",
	} {
		t.Setenv(name, "")
	}
}

func TestCredentials(t *testing.T) {
	config := func(at string) (string, string, error) {
		u, err := url.Parse(at)
		require.NoError(t, err)
		c, err := onaws.Config(t.Context(), u, &http.Client{})
		if err != nil {
			return "", "", err
		}
		found, err := c.Credentials.Retrieve(t.Context())
		require.NoError(t, err)
		return found.AccessKeyID + ":" + found.SecretAccessKey + ":" + found.SessionToken, c.Region, nil
	}
	alone(t)
	_, _, err := config("s3://bucket")
	require.ErrorContains(t, err, "there are no credentials for s3://bucket: put them into the address, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE")

	require.NoError(t, os.WriteFile(os.Getenv("AWS_CONFIG_FILE"), []byte("[profile billing]\nregion = eu-north-1\n"), 0o600))
	require.NoError(t, os.WriteFile(os.Getenv("AWS_SHARED_CREDENTIALS_FILE"), []byte("[billing]\naws_access_key_id = of\naws_secret_access_key = profile\n"), 0o600))
	t.Setenv("AWS_PROFILE", "billing")
	found, region, err := config("s3://bucket")
	require.NoError(t, err)
	require.Equal(t, "of:profile: eu-north-1", found+" "+region)

	t.Setenv("AWS_ACCESS_KEY_ID", "of")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "variables")
	t.Setenv("AWS_SESSION_TOKEN", "session")
	found, region, err = config("s3://bucket?region=eu-west-1")
	require.NoError(t, err)
	require.Equal(t, "of:variables:session eu-west-1", found+" "+region)

	// Its servers would go before the address's, or would not be probed.
	t.Setenv("AWS_ENDPOINT_URL_S3", "http://other")
	u, err := url.Parse("s3://bucket?endpoint=http://here")
	require.NoError(t, err)
	c, err := onaws.Config(t.Context(), u, &http.Client{})
	require.NoError(t, err)
	require.Equal(t, "http://here", *onaws.OpenBucket(u, c).Client.Options().BaseEndpoint)
	u.RawQuery = ""
	c, err = onaws.Config(t.Context(), u, &http.Client{})
	require.NoError(t, err)
	require.Nil(t, onaws.OpenBucket(u, c).Client.Options().BaseEndpoint)

	t.Setenv("AWS_PROFILE", "missing") // doesn't matter to an address with credentials
	found, region, err = config("s3://in:address@bucket")
	require.NoError(t, err)
	require.Equal(t, "in:address: us-east-1", found+" "+region)
}

// A role's credentials expire during a long job.
func TestRoleIsRenewed(t *testing.T) {
	alone(t)
	var n atomic.Int64
	role := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(w, `{"AccessKeyId":"id%d","SecretAccessKey":"secret","Token":"token","Expiration":%q}`,
			n.Add(1), time.Now().Add(-time.Minute).UTC().Format(time.RFC3339))
	}))
	defer role.Close()
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", role.URL)
	c, err := onaws.Config(t.Context(), &url.URL{Scheme: onaws.S3, Host: "bucket"}, http.DefaultClient)
	require.NoError(t, err)
	found, err := c.Credentials.Retrieve(t.Context())
	require.NoError(t, err)
	require.Equal(t, "id2", found.AccessKeyID)
}

// A metadata service that doesn't answer doesn't hold up a job beyond its context.
func TestConfigEndsWithContext(t *testing.T) {
	alone(t)
	ctx, cancel := context.WithCancel(t.Context())
	end := make(chan struct{})
	silent := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { cancel(); <-end }))
	defer silent.Close()
	defer close(end) // the SDK goes on with its request
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", silent.URL)
	_, err := onaws.Config(ctx, &url.URL{Scheme: onaws.S3, Host: "bucket"}, http.DefaultClient)
	require.ErrorIs(t, err, context.Canceled)
}
